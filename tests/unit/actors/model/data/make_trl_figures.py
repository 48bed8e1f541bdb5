"""Writes trl_figures.json: what trl's own GRPO loss says of a few small tensors, for
tests/unit/actors/model/test_grpo.py.

trl takes 15 seconds to import and pulls in accelerate, so the tests compare with its figures rather than with it.
To make them again, with trl's code in a folder of its own:

    pip install --no-deps --target trl_code trl==1.16.0 accelerate==1.15.0
    PYTHONPATH=trl_code python -m tests.unit.data.make_trl_figures

`GRPOTrainer._compute_loss` runs unchanged; only the trainer around it, and the log-probs of a model, are stood in for.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

LENGTHS = (6, 3, 1, 5)
CASES = (
    {"aggregation": "sequence_mean", "eps_clip": 0.2, "eps_clip_higher": 0.2, "kl_ctl": 0.0},
    {"aggregation": "token_mean", "eps_clip": 0.2, "eps_clip_higher": 0.28, "kl_ctl": 0.0},
    {"aggregation": "token_mean", "eps_clip": 0.1, "eps_clip_higher": 0.3, "kl_ctl": 0.05},
    {"aggregation": "sequence_mean", "eps_clip": 0.2, "eps_clip_higher": 0.28, "kl_ctl": 0.1},
)
LOSS_TYPES = {"sequence_mean": "grpo", "token_mean": "dapo"}


def inputs() -> dict[str, torch.Tensor]:
    """Four sequences of up to six tokens; ratios from 0.5 to 2, so that both clips are met."""
    generator = torch.Generator().manual_seed(7)

    def rounded(tensor):
        return (tensor * 1000).round() / 1000

    logprobs = rounded(-3 * torch.rand(4, 6, generator=generator))
    return {
        "logprobs": logprobs,
        "old_logprobs": rounded(logprobs + 0.35 * torch.randn(4, 6, generator=generator)),
        "ref_logprobs": rounded(logprobs + 0.5 * torch.randn(4, 6, generator=generator)),
        "advantages": torch.tensor([1.25, -0.75, 0.5, -1.0]),
    }


def stand_in(case, logprobs, metrics) -> SimpleNamespace:
    """As much of a GRPOTrainer as `_compute_loss` looks at."""
    accelerator = SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=case["kl_ctl"],
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=LOSS_TYPES[case["aggregation"]],
        epsilon_low=case["eps_clip"],
        epsilon_high=case["eps_clip_higher"],
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": metrics},
    )


def figures(case, tensors) -> dict[str, object]:
    logprobs = tensors["logprobs"].clone().requires_grad_()
    mask = (torch.arange(6)[None] < torch.tensor(LENGTHS)[:, None]).float()
    metrics = defaultdict(list)
    batch = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(4, 1),
        "completion_ids": torch.zeros(4, 6, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old_logprobs"],
        "ref_per_token_logps": tensors["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(stand_in(case, logprobs, metrics), None, batch)
    loss.backward()
    return {
        "loss": loss.item(),
        "gradient": logprobs.grad.tolist(),
        "clipped_low": metrics["clip_ratio/low_mean"][0],
        "clipped_high": metrics["clip_ratio/high_mean"][0],
        "kl": metrics["kl"][0] if metrics["kl"] else None,
    }


def main() -> None:
    tensors = inputs()
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.2, 0.9, 0.4, 0.4]])
    table = {
        "source": f"trl {trl.__version__}: GRPOTrainer._compute_loss, trainer.utils.nanstd",
        "lengths": LENGTHS,
        "inputs": {name: tensor.tolist() for name, tensor in tensors.items()},
        "cases": [{**case, **figures(case, tensors)} for case in CASES],
        "rewards": rewards.tolist(),
        "reward_std": nanstd(rewards, dim=1).tolist(),
    }
    Path(__file__).with_name("trl_figures.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
