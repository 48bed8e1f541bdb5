"""The losses of TRL, verl and AReaL, called from the user's own copies of them, on padded tensors.

    python -m scripts.lab.compare_losses --trl …/site-packages --verl …/site-packages --areal …/site-packages

Nothing of theirs is kept here. TRL and verl are imported; of AReaL three files are loaded as they are, and what they
import of its other parts, which the losses don't use, is replaced by empty stand-ins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

AREAL_FILES = {
    "areal.utils.data": "areal/utils/data.py",
    "areal.utils.functional": "areal/utils/functional/functional.py",
    "areal.trainer.ppo.actor": "areal/trainer/ppo/actor.py",
}


def trl_loss(trainer: Any, case: Any, logprobs: Tensor, entropy: Tensor, settings: dict[str, Any]) -> Tensor:
    """`GRPOTrainer._compute_loss`; `settings` are its attributes."""
    accelerator = SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t)
    stand_in = SimpleNamespace(
        **{
            "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, entropy, None),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "args": SimpleNamespace(
                use_bias_correction_kl=False, delta=settings.pop("delta", None), steps_per_generation=1
            ),
            "use_vllm": False,
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "accelerator": SimpleNamespace(**vars(accelerator), sync_gradients=True),
            "_entropy_bonus_enabled": settings.get("entropy_coef", 0.0) > 0,
            "use_adaptive_entropy": False,
            "max_completion_length": case.longest,
            "_metrics": {"train": defaultdict(list)},
            **settings,
        }
    )
    rows = len(case.lengths)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(rows, 1),
        "completion_ids": torch.zeros(rows, case.longest, dtype=torch.int64),
        "completion_mask": case.mask * case.kept[:, None],
        "advantages": case.advantages,
        "old_per_token_logps": case.padded(case.old),
        "ref_per_token_logps": case.padded(case.ref),
        "num_items_in_batch": (case.mask * case.kept[:, None]).sum(),
    }
    loss: Tensor = trainer._compute_loss(stand_in, None, inputs)  # noqa: SLF001
    return loss


def verl_loss(verl: Any, case: Any, logprobs: Tensor, name: str, mode: str, **settings: Any) -> Tensor:
    """`core_algos.get_policy_loss_fn(name)` with an ActorConfig of `settings`."""
    actor = importlib.import_module("verl.workers.config").ActorConfig
    config = actor(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        global_batch_info={"loss_scale_factor": case.longest} if mode == "seq-mean-token-sum-norm" else {},
        **settings,
    )
    loss: Tensor = verl.get_policy_loss_fn(name)(
        old_log_prob=case.padded(case.old),
        log_prob=logprobs,
        advantages=case.advantages[:, None].expand(-1, case.longest),
        response_mask=case.mask,
        loss_agg_mode=mode,
        config=config,
    )[0]
    return loss


def areal_loss(
    functional: Any, case: Any, logprobs: Tensor, *, cap: float | None = None, action: str = "", **settings: Any
) -> Tensor:
    """`ppo_actor_loss_fn`; with a `cap` decoupled: then `case.ref` are the proximal log-probs."""
    old = case.padded(case.old)
    over = SimpleNamespace(level="token", action=action, metric="ratio", agg="mean", upper=cap, lower=None)
    loss: Tensor = functional.ppo_actor_loss_fn(
        logprobs=logprobs,
        proximal_logprobs=old if cap is None else case.padded(case.ref),
        rejection_sampling=None if cap is None else over,
        old_logprobs=old,
        advantages=case.advantages[:, None].expand(-1, case.longest),
        loss_mask=case.mask.bool(),
        **settings,
    )[0]
    return loss


def areal_advantages(areal: Any, case: Any, kl_ctl: float, estimator: str, adv_norm: Any) -> Tensor:
    """`PPOActor._compute_advantages` [rows, longest]: a prompt token before each completion, a pad after all."""
    rows, width = len(case.lengths), case.longest + 2
    mask = torch.zeros(rows, width)
    mask[:, 1:-1] = case.mask
    attended = mask.clone()
    attended[:, 0] = 1
    data = importlib.import_module("areal.utils.data")
    norm = {"mean_leave1out": False, "std_unbiased": True, "eps": 1e-6, "group_size": case.group}
    actor = types.SimpleNamespace(
        config=SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=False),
        reward_bias=0.0,
        reward_scaling=1.0,
        reward_clip=20.0,
        kl_ctl=kl_ctl,
        kl_estimator=data.KLEstimator(estimator),
        reward_norm=data.Normalization(SimpleNamespace(mean_level="group", std_level="group", **norm)),
        adv_norm=None if adv_norm is None else data.Normalization(adv_norm),
        discount=1.0,
        gae_lambda=1.0,
        mask_no_eos_with_zero=False,
    )
    server, ref = torch.zeros(rows, width), torch.zeros(rows, width)
    server[:, 1:-1], ref[:, :-2] = (
        case.padded(case.old),
        case.padded(case.ref),
    )  # theirs are rolled, the reference's not
    batch = {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "rewards": case.rewards.double(),  # as float32 the mean of nearly equal ones is off by 1e-6 of a deviation
        "loss_mask": mask,
        "attention_mask": attended,
        "logprobs": server,
        "ref_logp": ref,
    }
    found: Tensor = areal.PPOActor._compute_advantages(actor, batch)["advantages"][:, :-2]  # noqa: SLF001
    return found


class _Anything(type):
    """Of a class that stands in for whatever a file imports and the losses don't use."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, given: given})


def load_areal(folder: Path) -> dict[str, Any]:
    """AREAL_FILES below `folder`, by name; every other module that they ask for in vain is a stand-in."""
    loaded: dict[str, Any] = {}
    _stand_in("areal")  # else its __init__ would import all of it
    for name, file in AREAL_FILES.items():
        spec = importlib.util.spec_from_file_location(name, folder / file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded[name] = module
        _until_loaded(partial(spec.loader.exec_module, module))
    return loaded


def _until_loaded(load: Callable[[], None]) -> None:
    while True:
        try:
            return load()
        except ModuleNotFoundError as missing:
            if missing.name is None or missing.name in sys.modules:
                raise
            _stand_in(missing.name)


def _stand_in(name: str) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda wanted: getattr(_Anything("module", (), {}), wanted)  # type: ignore[method-assign]
    sys.modules[name] = module
