"""Compares our losses, value and gradient, with those of TRL, verl and AReaL on random cases.

    python -m scripts.lab.compare_losses --trl FOLDER --verl FOLDER --areal FOLDER [--cases 200]

FOLDER holds the package: a checkout, or the site-packages of an environment that has it (`pip install --no-deps` will
do, with torch and transformers beside it). What isn't given, and what there is no counterpart for, is named at the end.
Ours goes through `Objective`: the batch is cut into micro-batches, and only the model is replaced by given log-probs.
Exit codes: 0 all equal within TOLERANCE, 1 not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from actors.model.advantages import batch_normalised, group_advantages
from actors.model.grpo import reference_kl
from actors.model.objective import Objective
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutGroup
from launcher.config.recipe import AdvNormConfig, Estimator, Level, RewardNormConfig
from launcher.config.schema import ActorConfig, MicroBatchConfig
from scripts.lab import peer_losses

TOLERANCE = 1e-6
"""Float32, summed in another order. A gradient's difference is a share of its largest entry, or of 1e-3 where all are
smaller; a value's one of 1, which the terms of a loss are about, as they cancel out in it."""
NOT_COMPARED = (
    "AReaL's mask_no_eos_with_zero (it sets a reward to 0, ours leaves the completion out), "
    "reward_bias, reward_scaling and reward_clip of AReaL (not here), dynamic sampling (which has no loss), "
    "several optimizer steps (tests hold them equal to single ones), the entropy of verl"
)
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random batch; what is `flat` has an entry for each token."""

    group: int
    lengths: Tensor
    rewards: Tensor
    logprobs: Tensor
    old: Tensor
    ref: Tensor
    entropy: Tensor
    kept: Tensor
    longest: int = 12

    @property
    def mask(self) -> Tensor:
        return (torch.arange(self.longest)[None] < self.lengths[:, None]).float()

    @property
    def advantages(self) -> Tensor:
        return group_advantages(self.rewards.double().view(-1, self.group), RewardNormConfig()).flatten().float()

    def padded(self, flat: Tensor) -> Tensor:
        return torch.zeros_like(self.mask).masked_scatter(self.mask.bool(), flat)

    def groups(self) -> list[RolloutGroup]:
        """Tokens are numbered through the batch, so that a stand-in for the model knows which one is asked for."""
        rollouts, token = [], 0
        for row, length in enumerate(self.lengths.tolist()):
            completion = Completion(
                token_ids=tuple(range(token, token + length)),
                logprobs=tuple(self.old[token : token + length].tolist()),
                weight_version=0,
                finish_reason="stop" if self.kept[row] else "length",
            )
            rollouts.append(Rollout(completion=completion, text="", reward=float(self.rewards[row])))
            token += length
        return [
            RolloutGroup(
                prompt=Prompt(id=str(n), token_ids=(0,), record={}), rollouts=tuple(rollouts[n : n + self.group])
            )
            for n in range(0, len(rollouts), self.group)
        ]


def make_case(seed: int) -> Case:
    source = torch.Generator().manual_seed(seed)
    group, groups = int(torch.randint(2, 6, (), generator=source)), int(torch.randint(1, 4, (), generator=source))
    lengths = torch.randint(1, 13, (group * groups,), generator=source)
    n = int(lengths.sum())
    logprobs = -3 * torch.rand(n, generator=source)
    kept = torch.rand(len(lengths), generator=source) > 0.2
    kept[0] = True
    return Case(
        group=group,
        lengths=lengths,
        rewards=torch.rand(len(lengths), generator=source),
        logprobs=logprobs,
        old=logprobs + 0.4 * torch.randn(n, generator=source),
        ref=logprobs + 0.5 * torch.randn(n, generator=source),
        entropy=3 * torch.rand(n, generator=source),
        kept=kept,
    )


def ours(case: Case, **settings: Any) -> Pair:
    """The loss and its gradient for log-probs and entropies [2, tokens]; decoupled: `ref` is proximal."""
    leaf = torch.stack([case.logprobs, case.entropy]).requires_grad_()
    config = ActorConfig(
        path="", max_new_tokens=case.longest, mb_spec=MicroBatchConfig(40), **{"eps_clip_higher": 0.28, **settings}
    )

    def model(input_ids: Tensor, positions: Tensor, targets: Tensor, **_: object) -> Pair:
        return leaf[0][targets], leaf[1][targets]

    objective = _objective(config, case)
    (batch,) = objective.prepare(case.groups())[0]
    prox = case.ref if config.use_decoupled_loss else case.old
    parts = [replace(one, old_logprobs=prox[one.targets]) for one in batch.micro_batches]
    loss = torch.stack([objective.run(model, one, batch).totals[0] for one in parts]).sum()
    return loss.float(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _objective(config: ActorConfig, case: Case) -> Any:
    """With a reference, where the loss needs one, whose log-probs are `case.ref`."""

    def reference(input_ids: Tensor, positions: Tensor, targets: Tensor, **_: object) -> Pair:
        return case.ref[targets], case.ref[targets]

    reference.model = SimpleNamespace(dtype=torch.float32)  # type: ignore[attr-defined]
    needed: Any = reference if config.needs_reference else None
    return Objective(config, temperature=1.0, dtype=torch.float32, reference=needed)


def theirs(case: Case, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    leaf = torch.stack([case.logprobs, case.entropy]).requires_grad_()
    loss = loss_of(case.padded(leaf[0]), case.padded(leaf[1]))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
LEVELS: tuple[Level | None, ...] = ("group", "batch", None)
OF_A_GROUP: tuple[Level | None, ...] = ("group", None)
OF_THE_BATCH: tuple[Literal["batch"] | None, ...] = ("batch", None)
PER_SEQUENCE = {"importance_sampling_level": "sequence"}
SEQUENCE = {**PER_SEQUENCE, "loss_aggregation": "sequence_mean"}
CONSTANT = {"loss_aggregation": "constant_length"}
CISPO = {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 0.5}
CLIPS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
TRL: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("clip higher, token mean (dapo)", {}, {"loss_type": "dapo", **CLIPS}),
    ("sequence mean (grpo)", {"loss_aggregation": "sequence_mean"}, {"loss_type": "grpo", **CLIPS}),
    ("Dr. GRPO (dr_grpo)", CONSTANT, {"loss_type": "dr_grpo", **CLIPS}),
    ("GSPO (sequence, grpo)", SEQUENCE, {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIPS}),
    ("CISPO (cispo)", CISPO, {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.5}),
    ("dual clip (delta)", {"c_clip": 1.6}, {"loss_type": "dapo", "delta": 1.6, **CLIPS}),
    ("k3 KL in the loss (beta)", {"kl_loss_coef": 0.1}, {"loss_type": "dapo", "beta": 0.1, **CLIPS}),
    ("entropy (entropy_coef)", {"entropy_coeff": 0.1}, {"loss_type": "dapo", "entropy_coef": 0.1, **CLIPS}),
)
LOW_HIGH = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
VERL: tuple[tuple[str, dict[str, Any], str, str, dict[str, Any]], ...] = (
    ("dual clip, token mean (vanilla)", {"c_clip": 1.6}, "vanilla", "token-mean", {"clip_ratio_c": 1.6}),
    (
        "sequence mean (vanilla)",
        {"c_clip": 3.0, "loss_aggregation": "sequence_mean"},
        *("vanilla", "seq-mean-token-mean", {}),
    ),
    ("Dr. GRPO (vanilla)", {"c_clip": 3.0, **CONSTANT}, "vanilla", "seq-mean-token-sum-norm", {}),
    ("GSPO (gspo)", SEQUENCE, "gspo", "seq-mean-token-mean", {}),
    ("CISPO (cispo)", {"policy_loss": "cispo"}, "cispo", "token-mean", {}),
)
DECOUPLED = {"use_decoupled_loss": True, "behave_imp_weight_cap": 1.2}
AREAL: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("clip higher (ppo_actor_loss_fn)", {}, {}),
    ("dual clip (c_clip)", {"c_clip": 1.6}, {"c_clip": 1.6}),
    ("GSPO's ratio, token mean (sequence)", PER_SEQUENCE, PER_SEQUENCE),
    ("decoupled, truncated", DECOUPLED, {"cap": 1.2, "action": "clamp"}),
    ("decoupled, masked", {**DECOUPLED, "behave_imp_weight_mode": "token_mask"}, {"cap": 1.2, "action": "mask"}),
)


def of_trl(folder: Path) -> Iterator[tuple[str, Callable[[Case], tuple[Pair, Pair]]]]:
    sys.path.insert(0, str(folder))
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    version = importlib.import_module("trl").__version__
    for masked in (False, True):
        for name, settings, yours in TRL if not masked else TRL[:3]:
            mine = {**settings, "mask_truncated_completions": masked}

            def both(case: Case, mine: Any = mine, yours: Any = yours, masked: bool = masked) -> tuple[Pair, Pair]:
                case = case if masked else _all_kept(case)
                loss = lambda lp, entropy: peer_losses.trl_loss(trainer, case, lp, entropy, dict(yours))  # noqa: E731
                return ours(case, **mine), theirs(case, loss)

            yield f"TRL {version}: {name}{', truncated ones left out' if masked else ''}", both
    punish = importlib.import_module("trl.rewards.other_rewards").get_soft_overlong_punishment(12, 5)
    penalty = {"overlong_reward_penalty": True, "overlong_tokens": 5, "overlong_penalty_factor": 1.0}

    def lengths(case: Case) -> tuple[Pair, Pair]:
        config = ActorConfig(path="", max_new_tokens=12, **penalty)  # type: ignore[arg-type]
        objective = Objective(config, temperature=1.0, dtype=torch.float32, reference=None)
        mine = objective.penalties(case.groups()).flatten().float()
        return _values(mine), _values(torch.tensor(punish([[0] * n for n in case.lengths.tolist()])))

    yield f"TRL {version}: overlong penalty", lengths


def of_verl(folder: Path) -> Iterator[tuple[str, Callable[[Case], tuple[Pair, Pair]]]]:
    sys.path.insert(0, str(folder))
    verl = importlib.import_module("verl.trainer.ppo.core_algos")
    version = (folder / "verl/version/version").read_text().strip()
    for name, mine, loss_name, mode, yours in VERL:

        def both(
            case: Case, mine: Any = mine, loss_name: str = loss_name, mode: str = mode, yours: Any = yours
        ) -> tuple[Pair, Pair]:
            case = _all_kept(case)
            loss = lambda lp, _: peer_losses.verl_loss(verl, case, lp, loss_name, mode, **LOW_HIGH, **yours)  # noqa: E731
            return ours(case, **mine), theirs(case, loss)

        yield f"verl {version}: {name}", both
    for estimator in ESTIMATORS:

        def kl(case: Case, estimator: str = estimator) -> tuple[Pair, Pair]:
            mine, yours = (case.logprobs.clone().requires_grad_() for _ in range(2))
            values = reference_kl(mine, case.ref, estimator), verl.kl_penalty(yours, case.ref, estimator)
            for value in values:
                value.sum().backward()
            assert mine.grad is not None
            assert yours.grad is not None
            return (values[0].detach(), mine.grad), (values[1].detach(), yours.grad)

        yield f"verl {version}: KL {estimator}", kl
    for level in OF_A_GROUP:

        def advantages(case: Case, level: Level | None = level) -> tuple[Pair, Pair]:
            mine = group_advantages(case.rewards.view(-1, case.group), RewardNormConfig(std_level=level)).flatten()
            index = (torch.arange(len(case.lengths)) // case.group).numpy()
            first = torch.zeros_like(case.mask)
            first[:, 0] = case.rewards
            yours, _ = verl.compute_grpo_outcome_advantage(
                first, case.mask, index, norm_adv_by_std_in_grpo=level is not None
            )
            return _values(mine), _values(yours[:, 0])

        yield f"verl {version}: advantages, deviation of {level or 'nothing'}", advantages


def of_areal(folder: Path) -> Iterator[tuple[str, Callable[[Case], tuple[Pair, Pair]]]]:
    files = peer_losses.load_areal(folder)
    functional, data, actor = (
        files[name] for name in ("areal.utils.functional", "areal.utils.data", "areal.trainer.ppo.actor")
    )
    for name, mine, yours in AREAL:

        def both(case: Case, mine: Any = mine, yours: Any = yours) -> tuple[Pair, Pair]:
            case = _all_kept(case)
            loss = lambda lp, _: peer_losses.areal_loss(  # noqa: E731
                functional, case, lp, eps_clip=0.2, eps_clip_higher=0.28, **yours
            )
            return ours(case, **mine), theirs(case, loss)

        yield f"AReaL: {name}", both
    for mean in LEVELS:
        for std in LEVELS:

            def norms(case: Case, mean: Level | None = mean, std: Level | None = std) -> tuple[Pair, Pair]:
                mine = group_advantages(case.rewards.double().view(-1, case.group), RewardNormConfig(mean, std, 1e-5))
                settings = SimpleNamespace(**_norm(mean, std), group_size=case.group)
                return _values(mine.flatten().float()), _values(data.Normalization(settings)(case.rewards.double()))

            yield f"AReaL: reward_norm, mean {mean}, deviation {std}", norms
    for estimator in ESTIMATORS:
        for level in OF_THE_BATCH:

            def in_reward(
                case: Case, estimator: Estimator = estimator, level: Literal["batch"] | None = level
            ) -> tuple[Pair, Pair]:
                case = _all_kept(case)
                settings = SimpleNamespace(**_norm(level, level), group_size=1) if level else None
                yours = peer_losses.areal_advantages(actor, case, 0.1, estimator, settings)[case.mask.bool()]
                return _values(_with_kl(case, estimator, level)), _values(yours)

            yield f"AReaL: kl_ctl, {estimator}, adv_norm {level}", in_reward


def _with_kl(case: Case, estimator: Estimator, level: Literal["batch"] | None) -> Tensor:
    config = ActorConfig(path="", max_new_tokens=12, kl_ctl=0.1, kl_estimator=estimator)

    objective = _objective(config, case)
    (batch,) = objective.prepare(case.groups())[0]
    found = torch.zeros_like(case.logprobs)
    for one in batch.micro_batches:
        looked, _ = objective.look_ahead(None, one, batch, before_steps=False)
        found[one.targets] = looked.advantages
    if level is None:
        return found
    norm = AdvNormConfig(level, level, 1e-5)
    return batch_normalised([found], [torch.ones_like(found).double()], norm, total=lambda here: here)[0]


def _norm(mean: str | None, std: str | None) -> dict[str, Any]:
    return {"mean_level": mean, "std_level": std, "mean_leave1out": False, "std_unbiased": True, "eps": 1e-5}


def _all_kept(case: Case) -> Case:
    return Case(**{**vars(case), "kept": torch.ones_like(case.kept)})


def _values(values: Tensor) -> Pair:
    """Without a gradient."""
    return values, values.new_empty(0)


def _apart(left: Tensor, right: Tensor, least: float) -> float:
    if not right.numel():
        return 0.0
    return ((left - right).abs().max() / right.abs().max().clamp(min=least)).item()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.lab.compare_losses", description=__doc__.splitlines()[0])
    for name in ("trl", "verl", "areal"):
        parser.add_argument(f"--{name}", type=Path, help=f"folder that holds the package {name}")
    parser.add_argument("--cases", type=int, default=200, help="random batches for each loss (default: 200)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    cases = [make_case(seed) for seed in range(arguments.cases)]
    bad = 0
    for name, of_peer in (("trl", of_trl), ("verl", of_verl), ("areal", of_areal)):
        folder = getattr(arguments, name)
        if folder is None:
            print(f"not compared with {name}: --{name} is not given")
            continue
        if not (folder / name).is_dir():
            parser.error(f"--{name}={folder}: there is no folder {name} in it")
        for what, both in of_peer(folder.resolve()):
            pairs = [both(case) for case in cases]
            value = max(_apart(mine[0], yours[0], 1.0) for mine, yours in pairs)
            gradient = max(_apart(mine[1], yours[1], 1e-3) for mine, yours in pairs)
            shown = f"{gradient:.1e}" if pairs[0][1][1].numel() else "      -"
            is_equal = max(value, gradient) <= TOLERANCE
            bad += not is_equal
            print(f"{'equal ' if is_equal else 'DIFFER'} {value:.1e} {shown}  {what}")
    print(f"largest difference of values, then of gradients, over {len(cases)} cases; allowed {TOLERANCE:g}")
    print(f"not compared: {NOT_COMPARED}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
