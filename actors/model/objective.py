"""The GRPO objective of one batch under a model: what each sequence contributes, forward and backward passes, figures.

Between the plain formulas of `grpo.py` and the model in `policy_model.py`: this part knows how log-probs come
out of a model (arithmetic, temperature, reference) and how a batch is cut, run and summed up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actors.model.grpo import clipped_terms, group_advantages, reference_kl, token_weights
from actors.model.micro_batches import MicroBatch, sequences_of, share_out
from actors.model.token_logprobs import LogprobModel
from launcher.base.errors import TrainerError
from launcher.base.rollouts import RolloutGroup
from launcher.config.schema import ActorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch ready to run. `advantages` and `weights` have an entry for each sequence of it, `micro_batches` are one
    rank's; all else is of the complete batch."""

    advantages: Tensor
    weights: Tensor
    micro_batches: list[MicroBatch]
    n_tokens: int
    n_learning: int

    def to(self, device: torch.device) -> Batch:
        return replace(self, advantages=self.advantages.to(device), weights=self.weights.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Of one micro-batch, or of several: `totals` [8] over its tokens, float64, the loss and then
    FIGURES; `farthest` is a maximum. `distances` [sequences of the batch]: sums over the tokens of each, 0 where it is
    of another one.

    They stay on the device until the complete batch is done: a figure asked for earlier would hold up the GPU.
    """

    totals: Tensor
    farthest: Tensor
    distances: Tensor


FIGURES = ("clip_fraction_low", "clip_fraction_high", "ratio_mean", "approx_kl", "kl_ref", "entropy", "distance")
"""Means over the completion tokens, in the order of the totals after the loss."""


class Objective:
    """Runs micro-batches of a policy against the server's log-probs and, if there is one, a reference."""

    def __init__(
        self, actor: ActorConfig, *, temperature: float, dtype: torch.dtype, reference: LogprobModel | None
    ) -> None:
        self._actor = actor
        self._temperature = temperature
        self._dtype = dtype
        self._reference = reference

    def prepare(self, groups: Sequence[RolloutGroup], *, ranks: int = 1) -> list[Batch]:
        """The batch as each rank runs it. Raises TrainerError for groups that are no batch, ConfigError for a sequence
        longer than a micro-batch.

        A sequence whose advantage is 0 has no gradient, unless there is a KL, so it is spared its backward pass.
        """
        advantages = self._advantages(groups)
        sequences = sequences_of(groups)
        lengths = torch.tensor([len(one.completion) for one in sequences])
        learning = [value != 0 or self._reference is not None for value in advantages.tolist()]  # NaN learns: it shows
        most = self._actor.mb_spec.max_tokens_per_mb
        return [
            Batch(
                advantages=advantages,
                weights=token_weights(lengths, self._actor.loss_aggregation),
                micro_batches=micro_batches,
                n_tokens=int(lengths.sum()),
                n_learning=sum(learning),
            )
            for micro_batches in share_out(sequences, learning, max_tokens=most, ranks=ranks)
        ]

    def run(self, model: LogprobModel, micro_batch: MicroBatch, batch: Batch) -> Sums:
        """Forward, and where the micro-batch learns backward: its gradient is added to the model's."""
        advantages = batch.advantages[micro_batch.sequences]
        server = micro_batch.server_logprobs
        with torch.set_grad_enabled(micro_batch.learns):
            logprobs, entropy = self.logprobs(model, micro_batch, temperature=self._temperature, dtype=self._dtype)
            fixed = logprobs.detach()
            terms = clipped_terms(
                logprobs,
                fixed if self._actor.recompute_logprob else server,
                advantages,
                eps_clip=self._actor.eps_clip,
                eps_clip_higher=self._actor.eps_clip_higher,
            )
            kl_ref = self._kl_ref(logprobs, micro_batch)
            weights = batch.weights[micro_batch.sequences]
            loss = (terms.loss + self._actor.kl_ctl * kl_ref) * weights
        if micro_batch.learns:
            loss.sum().backward()  # type: ignore[no-untyped-call]
        distance = (server - fixed).abs()
        columns = (
            loss, terms.clipped_low, terms.clipped_high, terms.ratio, terms.approx_kl, kl_ref, entropy, distance
        )  # fmt: skip
        return Sums(
            totals=torch.stack([column.detach().sum(dtype=torch.float64) for column in columns]),
            farthest=distance.amax() if len(distance) else distance.sum(),
            distances=torch.zeros_like(batch.weights, dtype=torch.float64).index_add(
                0, micro_batch.sequences, distance.double()
            ),
        )

    def add_up(self, sums: Sequence[Sums]) -> Sums:
        return Sums(
            totals=torch.stack([one.totals for one in sums]).sum(dim=0),
            farthest=torch.stack([one.farthest for one in sums]).amax(),
            distances=torch.stack([one.distances for one in sums]).sum(dim=0),
        )

    def figures(self, batch: Batch, sums: Sums) -> dict[str, float]:
        """FIGURES, `loss` as it is weighted, and the maximum `farthest`, in one transfer from the device.

        Over no tokens at all they are not numbers, as 0 / 0 is not.
        """
        if not batch.n_tokens:
            return dict.fromkeys(("loss", *FIGURES, "farthest"), math.nan)
        loss, *totals, farthest = torch.cat([sums.totals, sums.farthest.double().reshape(1)]).tolist()
        means = {name: total / batch.n_tokens for name, total in zip(FIGURES, totals, strict=True)}
        return {"loss": loss, **means, "farthest": farthest}

    def distances(self, groups: Sequence[RolloutGroup], sums: Sums) -> dict[str, float]:
        """By server, the mean |server's - trainer's log-prob| over the tokens that it made; {} where one made all."""
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        if len({completion.server for completion in completions}) < 2:
            return {}
        by_sequence = sums.distances.tolist()
        totals: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for completion, total in zip(completions, by_sequence, strict=True):
            totals[completion.server] += total
            tokens[completion.server] += len(completion.token_ids)
        return {server: totals[server] / count for server, count in tokens.items() if count}

    def _advantages(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """One for each sequence, worked out in float64. A missing reward is not a number."""
        rewards = [[math.nan if r.reward is None else float(r.reward) for r in group.rollouts] for group in groups]
        sizes = sorted({len(group) for group in rewards})
        if len(sizes) != 1:
            raise TrainerError(f"a batch needs groups of one size, not of {sizes}", "a group is complete or not there")
        norm = self._actor.adv_norm
        table = torch.tensor(rewards, dtype=torch.float64)
        return group_advantages(table, std=norm.std, eps=norm.eps).flatten().float()

    def logprobs(
        self, model: LogprobModel, micro_batch: MicroBatch, *, temperature: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the completion tokens and the entropies there, in float32 whatever the arithmetic."""
        with _arithmetic(micro_batch.input_ids.device, dtype):
            found: tuple[Tensor, Tensor] = model(
                micro_batch.input_ids, micro_batch.positions, micro_batch.targets, temperature=temperature
            )
            return found

    def _kl_ref(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor:
        if self._reference is None:
            return torch.zeros_like(logprobs)
        dtype = self._reference.model.dtype
        with torch.no_grad():
            ref_logprobs, _ = self.logprobs(self._reference, micro_batch, temperature=self._temperature, dtype=dtype)
        return reference_kl(logprobs, ref_logprobs)


def _arithmetic(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Autocast for one forward pass: one kept open would pass weights cast without gradients to the next pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
