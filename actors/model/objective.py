"""The GRPO objective of one batch under a model: what each sequence contributes, forward and backward passes, figures.

Between the plain formulas of `grpo.py` and the model in `policy_model.py`: this part knows how log-probs come
out of a model (arithmetic, temperature, reference) and how a batch is cut, run and summed up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from actors.model.advantages import group_advantages, kl_to_come, overlong_penalty
from actors.model.grpo import (
    TokenTerms,
    behave_weights,
    cispo_terms,
    clipped_terms,
    reference_kl,
    sequence_mean_of,
    token_weights,
)
from actors.model.micro_batches import (
    MicroBatch,
    SampledSequence,
    batches_of,
    lay_out,
    sequences_of,
    tensors_of,
    tokens_in_rows,
)
from actors.model.token_logprobs import LogprobModel
from actors.model.update_stats import LogprobDistance
from launcher.base.errors import TrainerError
from launcher.base.rollouts import Completion, RolloutGroup
from launcher.config.schema import ActorConfig

Key = TypeVar("Key", bound=Hashable)
MOST_KL = 10.0
"""Of one token, taken off the reward: AReaL's bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch ready to run, or the part of it that one optimizer step is taken on. `advantages` and `weights` have an
    entry for each sequence of it, `micro_batches` are one rank's; all else is of all ranks. `n_tokens`: that the model
    made; `n_given`: those and the prompts'; `n_in_rows`: with their padding. `has_entropy`: it is computed."""

    advantages: Tensor
    weights: Tensor
    micro_batches: list[MicroBatch]
    n_tokens: int
    n_given: int
    n_in_rows: int
    n_learning: int
    has_entropy: bool

    def to(self, device: torch.device) -> Batch:
        return replace(self, advantages=self.advantages.to(device), weights=self.weights.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Of one micro-batch, or of several, on the device until the complete batch is done: a figure asked for earlier
    would hold up the GPU. `totals` over its tokens, float64, the loss and then FIGURES; `farthest` is a maximum.
    `distances` [sequences of the batch]: sums over the tokens of each, 0 where it is of another one."""

    totals: Tensor
    farthest: Tensor
    distances: Tensor


BEHAVE_FIGURES = ("behave_weight", "behave_over_cap")
FIGURES = (
    *("clip_fraction_low", "clip_fraction_high", "ratio_mean", "approx_kl", "kl_ref", "entropy"),
    *BEHAVE_FIGURES,
    "distance",
)
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

    @property
    def looks_ahead(self) -> bool:
        """Advantages take a pass over the complete batch before the first gradient."""
        norm = self._actor.adv_norm
        return self._actor.kl_ctl > 0 or norm.mean_level is not None or norm.std_level is not None

    def prepare(self, groups: Sequence[RolloutGroup], *, ranks: int = 1, policy_version: int = 0) -> list[list[Batch]]:
        """For each optimizer step its part of the batch, as each rank runs it. Raises TrainerError for groups that are
        no batch, ConfigError for a sequence longer than a micro-batch. `policy_version`: the batches stepped on before.

        Groups are not divided: each part has as many, in their order, or one more than the parts after it.
        """
        advantages = self._advantages(groups)
        sequences = sequences_of(groups)
        has_entropy = self._actor.computes_entropy(policy_version)
        kept = torch.tensor([self._is_kept(rollout.completion) for group in groups for rollout in group.rollouts])
        size = len(advantages) // len(groups)
        parts = torch.arange(len(groups)).tensor_split(min(self._actor.ppo_n_minibatches, len(groups)))
        ends = [size * (int(part[-1]) + 1) for part in parts]
        return [
            self._minibatch(
                [replace(one, rollout=one.rollout - start) for one in sequences if start <= one.rollout < end],
                advantages[start:end],
                kept[start:end],
                ranks,
                has_entropy,
            )
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def _minibatch(
        self, sequences: Sequence[SampledSequence], of_rollouts: Tensor, kept: Tensor, ranks: int, has_entropy: bool
    ) -> list[Batch]:
        """A sequence whose advantage is 0 has no gradient, unless there is a KL, an entropy or a mean over the batch,
        so it is spared its backward pass. Rollouts are weighed, by what the model made in all their sequences."""
        actor = self._actor
        all_learn = actor.needs_reference or actor.entropy_coeff > 0 or actor.adv_norm.mean_level is not None
        of = torch.tensor([one.rollout for one in sequences])
        own = torch.tensor([len(one.places) for one in sequences])
        lengths = torch.zeros_like(kept, dtype=torch.int64).index_add(0, of, own)
        weights = token_weights(lengths * kept, actor.loss_aggregation, constant=actor.max_new_tokens)
        advantages, weights, kept = of_rollouts[of], weights[of], kept[of]
        learning = (((advantages != 0) | all_learn) & kept).tolist()  # NaN learns: it shows
        most, given = actor.mb_spec.max_tokens_per_mb, [len(one) for one in sequences]
        laid = lay_out(given, learning, most, ranks=ranks)
        return [
            Batch(
                advantages=advantages,
                weights=weights * kept,
                micro_batches=micro_batches,
                n_tokens=int(lengths.sum()),
                n_given=sum(given),
                n_in_rows=tokens_in_rows(laid, given),
                n_learning=sum(learning),
                has_entropy=has_entropy,
            )
            for micro_batches in batches_of(sequences, laid)
        ]

    def _is_kept(self, completion: Completion) -> bool:
        return not self._actor.mask_truncated_completions or completion.finish_reason != "length"

    @torch.no_grad()
    def look_ahead(
        self, model: LogprobModel, micro_batch: MicroBatch, batch: Batch, *, before_steps: bool
    ) -> tuple[MicroBatch, Sums | None]:
        """The micro-batch with what is asked of the weights before any step: the advantages of its tokens, and of a
        batch with several steps its distances, since those of later passes are of other weights."""
        actor, sequences = self._actor, micro_batch.sequences
        server, old, ref, sums = micro_batch.server_logprobs, None, None, None
        of_trainer = actor.recompute_logprob and not actor.use_decoupled_loss
        if before_steps or (of_trainer and actor.kl_ctl > 0):
            found, _ = self.logprobs(model, micro_batch, temperature=self._temperature, dtype=self._dtype)
            sums = self._sums([], (server - found).abs(), micro_batch, batch)
            old = found if actor.recomputes else server
        advantages = batch.advantages[sequences]
        if actor.kl_ctl > 0:
            ref = self._ref_logprobs(micro_batch)
            sampled = old if of_trainer and old is not None else server
            kl = reference_kl(sampled, ref, actor.kl_estimator).clamp(-MOST_KL, MOST_KL)
            advantages = (advantages.double() - actor.kl_ctl * kl_to_come(kl.double(), sequences)).float()
        looked = replace(micro_batch, old_logprobs=old, ref_logprobs=ref, advantages=advantages)
        return looked, sums

    def run(self, model: LogprobModel, micro_batch: MicroBatch, batch: Batch) -> Sums:
        """Forward, and where the micro-batch learns backward: its gradient is added to the model's."""
        actor, server = self._actor, micro_batch.server_logprobs
        with torch.set_grad_enabled(micro_batch.learns):
            logprobs, entropy = self.logprobs(
                model,
                micro_batch,
                temperature=self._temperature,
                dtype=self._dtype,
                wants_entropy=batch.has_entropy,
            )
            fixed = logprobs.detach()
            old = fixed if actor.recomputes else server
            old = old if micro_batch.old_logprobs is None else micro_batch.old_logprobs
            terms = self._terms(logprobs, old, micro_batch, batch)
            behave, is_over = torch.ones_like(fixed), torch.zeros_like(fixed)
            if actor.use_decoupled_loss:
                masks = actor.behave_imp_weight_mode == "token_mask"
                behave, is_over = behave_weights(old, server, cap=actor.behave_imp_weight_cap, masks=masks)
            kl_ref = self._kl_ref(logprobs, micro_batch)
            weights = batch.weights[micro_batch.sequences]
            per_token = terms.loss * behave + actor.kl_loss_coef * kl_ref
            if actor.entropy_coeff > 0:
                assert entropy is not None, "a loss with an entropy has it computed in each step"
                per_token = per_token - actor.entropy_coeff * entropy
            loss = per_token * weights
        if micro_batch.learns:
            loss.sum().backward()  # type: ignore[no-untyped-call]
        columns = [loss, terms.clipped_low, terms.clipped_high, terms.ratio, terms.approx_kl, kl_ref]
        columns += [torch.zeros_like(fixed) if entropy is None else entropy, behave, is_over]
        return self._sums(columns, (server - fixed).abs(), micro_batch, batch)

    def _terms(self, logprobs: Tensor, old: Tensor, micro_batch: MicroBatch, batch: Batch) -> TokenTerms:
        actor, sequences = self._actor, micro_batch.sequences
        advantages = batch.advantages[sequences] if micro_batch.advantages is None else micro_batch.advantages
        log_ratio = logprobs - old
        if actor.importance_sampling_level == "sequence":
            n = len(batch.weights)
            log_ratio, advantages = (sequence_mean_of(one, sequences, n=n) for one in (log_ratio, advantages))
        if actor.policy_loss == "cispo":
            return cispo_terms(
                logprobs, log_ratio, advantages, eps_clip=actor.eps_clip, eps_clip_higher=actor.eps_clip_higher
            )
        return clipped_terms(
            log_ratio,
            advantages,
            eps_clip=actor.eps_clip,
            eps_clip_higher=actor.eps_clip_higher,
            c_clip=actor.c_clip,
        )

    @staticmethod
    def _sums(columns: Sequence[Tensor], distance: Tensor, micro_batch: MicroBatch, batch: Batch) -> Sums:
        """`columns` before the distance; without any they are 0."""
        filled = columns or [torch.zeros_like(distance)] * len(FIGURES)
        return Sums(
            totals=torch.stack([column.detach().sum(dtype=torch.float64) for column in (*filled, distance)]),
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

    def join(self, sums: Sequence[Sums]) -> Sums:
        """Those of the parts of a batch, in their order."""
        together = self.add_up([replace(one, distances=one.distances[:0]) for one in sums])
        return replace(together, distances=torch.cat([one.distances for one in sums]))

    def figures(self, n_tokens: int, sums: Sums) -> dict[str, float]:
        """FIGURES, `loss` as it is weighted, and the maximum `farthest`, in one transfer from the device.

        Over no tokens at all they are not numbers, as 0 / 0 is not.
        """
        if not n_tokens:
            return dict.fromkeys(("loss", *FIGURES, "farthest"), math.nan)
        loss, *totals, farthest = torch.cat([sums.totals, sums.farthest.double().reshape(1)]).tolist()
        means = {name: total / n_tokens for name, total in zip(FIGURES, totals, strict=True)}
        return {"loss": loss, **means, "farthest": farthest}

    def distance(
        self, groups: Sequence[RolloutGroup], sums: Sums, *, mean: float, farthest: float, version: int
    ) -> LogprobDistance:
        """|server's - trainer's log-prob| of the batch; `version`: of the trainer's weights."""
        sequences = list(zip(sequences_of(groups), sums.distances.tolist(), strict=True))
        current = [(one, total) for one, total in sequences if one.version == version]
        older = _means(((one.server, one.version), one, total) for one, total in sequences if one.version != version)
        if not current or not older:
            is_one = len({one.server for one, _ in sequences}) < 2
            by_server = {} if is_one else _means((one.server, one, total) for one, total in sequences)
            return LogprobDistance(mean=mean, max=farthest, by_server=by_server, older=older)
        return LogprobDistance(
            mean=mean,
            max=farthest,
            by_server=_means((one.server, one, total) for one, total in current),
            current=_means(("", one, total) for one, total in current).get(""),
            older=older,
        )

    def _advantages(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """One for each sequence, worked out in float64. A missing reward is not a number."""
        rewards = [[math.nan if r.reward is None else float(r.reward) for r in group.rollouts] for group in groups]
        sizes = sorted({len(group) for group in rewards})
        if len(sizes) != 1:
            raise TrainerError(f"a batch needs groups of one size, not of {sizes}", "a group is complete or not there")
        table = torch.tensor(rewards, dtype=torch.float64) + self.penalties(groups)
        return group_advantages(table, self._actor.reward_norm).flatten().float()

    def penalties(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """What is added to each reward [groups, n] for a length near the longest; 0 or less."""
        lengths = torch.tensor([[len(r.completion.token_ids) for r in group.rollouts] for group in groups]).double()
        actor = self._actor
        if not actor.overlong_reward_penalty or actor.overlong_tokens is None or actor.overlong_penalty_factor is None:
            return torch.zeros_like(lengths)
        return overlong_penalty(
            lengths,
            max_tokens=actor.max_new_tokens,
            overlong_tokens=actor.overlong_tokens,
            factor=actor.overlong_penalty_factor,
        )

    def logprobs(
        self,
        model: LogprobModel,
        micro_batch: MicroBatch,
        *,
        temperature: float,
        dtype: torch.dtype,
        wants_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the completion tokens, and the entropies there or None, in float32 whatever the arithmetic."""
        asked = (micro_batch.input_ids, micro_batch.positions, micro_batch.targets)
        with _arithmetic(micro_batch.input_ids.device, dtype):
            found: tuple[Tensor, Tensor | None] = model(*asked, temperature=temperature, wants_entropy=wants_entropy)
            return found

    def _kl_ref(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor:
        """By the estimator of the loss, or where only the reward has a KL, by that of the reward."""
        if self._reference is None:
            return torch.zeros_like(logprobs)
        ref = self._ref_logprobs(micro_batch) if micro_batch.ref_logprobs is None else micro_batch.ref_logprobs
        actor = self._actor
        return reference_kl(logprobs, ref, actor.kl_loss_type if actor.kl_loss_coef > 0 else actor.kl_estimator)

    @torch.no_grad()
    def _ref_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        assert self._reference is not None
        dtype = self._reference.model.dtype
        found, _ = self.logprobs(self._reference, micro_batch, temperature=self._temperature, dtype=dtype)
        return found


@torch.no_grad()
def completion_logprobs(
    model: LogprobModel,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[float]]:
    """Log-probs at temperature 1 of each token of the completions, in one pass. `texts`: prompts and completions."""
    sequences = [
        SampledSequence(prompt=tuple(prompt), completion=tuple(completion), logprobs=(0.0,) * len(completion))
        for prompt, completion in texts
    ]
    asked = tensors_of(sequences, range(len(sequences)), False).to(device)
    with _arithmetic(device, dtype):
        found, _ = model(asked.input_ids, asked.positions, asked.targets, temperature=1.0)
    return [part.tolist() for part in found.split([len(completion) for _, completion in texts])]


def _means(sums: Iterable[tuple[Key, SampledSequence, float]]) -> dict[Key, float]:
    """By key over tokens, of sums over those of each sequence."""
    totals: Counter[Key] = Counter()
    tokens: Counter[Key] = Counter()
    for key, one, total in sums:
        totals[key] += total  # type: ignore[assignment]
        tokens[key] += len(one.places)
    return {key: totals[key] / count for key, count in tokens.items() if count}


def _arithmetic(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Autocast for one forward pass: one kept open would pass weights cast without gradients to the next pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
