"""The figures of one step: of its batch of rollouts, and of the forward and backward pass over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from launcher.base.rollouts import RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDistance:
    """|server's log-prob - trainer's| over the completion tokens, in nats: does the server hold our weights?

    `by_server`: the mean of each one's tokens, by its URL; empty where one server made them all. Of a batch in which
    current and older weights made completions, `current` and `by_server` are of those that current ones made alone.
    `older`: of the others, by URL and (oldest) version.
    """

    mean: float
    max: float
    by_server: Mapping[str, float] = field(default_factory=dict)
    current: float | None = None
    older: Mapping[tuple[str, int], float] = field(default_factory=dict)

    @property
    def of_current(self) -> float | None:
        """Of what current weights made; None where older ones made all."""
        if self.current is not None:
            return self.current
        return None if self.older else self.mean

    def beside(self, others: LogprobDistance, *, makers: Iterable[str], other_makers: Iterable[str]) -> LogprobDistance:
        """The same with what of `others` it does not have. `makers`: the URLs of the servers of each."""
        mine, theirs = self._of_current(makers), others._of_current(other_makers)
        by_server, older = {**theirs, **mine}, {**others.older, **self.older}
        current = self.current if self.older else self.mean
        if current is None and theirs:
            current = fmean(theirs.values())
        return replace(
            self,
            by_server=by_server or self.by_server,
            current=current if older else None,
            older=older,
        )

    def _of_current(self, makers: Iterable[str]) -> Mapping[str, float]:
        if self.older and self.current is None:
            return {}
        return self.by_server or dict.fromkeys(makers, self.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Figures of one batch. All means are over its completion tokens, clip fractions are shares of those.

    Where it has several optimizer steps (`n_minibatches`), those of the steps so far; `loss` and `grad_norm` are their
    means. `grad_norm` is before clipping; `problems` names what is not finite, and such a batch must not be committed;
    `is_of_rewards`: their advantages are not, so that no weights could have made it finite.
    `kl_ref` is None without a reference, `entropy` where it is not computed, `overlong_penalty`, the mean over
    completions, where there is none.
    `behave_weight` and `behave_over_cap`, of the decoupled loss: the mean weight, and the share of tokens over the cap.
    `padding_ratio`: the share of padding among the tokens of a pass, of all ranks.
    `n_learning`: sequences whose advantage is not 0; none at all means that `commit` leaves the weights exactly as they
    are.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    clip_fraction_low: float
    clip_fraction_high: float
    ratio_mean: float
    approx_kl: float
    kl_ref: float | None
    overlong_penalty: float | None
    entropy: float | None
    logprob_distance: LogprobDistance
    n_learning: int
    n_tokens: int
    padding_ratio: float
    n_micro_batches: int
    n_minibatches: int
    problems: tuple[str, ...]
    is_of_rewards: bool = False
    behave_weight: float | None = None
    behave_over_cap: float | None = None

    @property
    def finite(self) -> bool:
        return not self.problems

    def metrics(self) -> dict[str, float]:
        """By their WandB keys."""
        figures = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            "clip_ratio/low": self.clip_fraction_low,
            "clip_ratio/high": self.clip_fraction_high,
            "importance_weight/avg": self.ratio_mean,
            "approx_kl/avg": self.approx_kl,
            "logprob_distance/avg": self.logprob_distance.mean,
            "logprob_distance/max": self.logprob_distance.max,
            "n_learning_seqs": float(self.n_learning),
            "n_tokens": float(self.n_tokens),
            "n_micro_batches": float(self.n_micro_batches),
            "padding_ratio": self.padding_ratio,
            "update_successful": float(self.finite),
        }
        if self.behave_weight is not None and self.behave_over_cap is not None:
            figures |= {"behave_imp_weight/avg": self.behave_weight, "behave_over_cap/avg": self.behave_over_cap}
        if self.entropy is not None:
            figures["entropy/avg"] = self.entropy
        if self.kl_ref is not None:
            figures["kl_ref/avg"] = self.kl_ref
        if self.overlong_penalty is not None:
            figures["overlong_penalty/avg"] = self.overlong_penalty
        if self.n_minibatches > 1:
            figures["n_minibatches"] = float(self.n_minibatches)
        return {f"grpo_actor/{name}": value for name, value in figures.items()}


def batch_metrics(batch: RolloutBatch, stats: UpdateStats) -> dict[str, float]:
    """One step's figures by their WandB keys. Lengths are tokens, rewards the reward function's own."""
    rewards = [rollout.reward for rollout in batch.rollouts if rollout.reward is not None]
    lengths = [len(rollout.completion.token_ids) for rollout in batch.rollouts]
    cut = [rollout.completion.finish_reason == "length" for rollout in batch.rollouts]
    return {
        "grpo_actor/task_reward/avg": fmean(rewards),
        "grpo_actor/task_reward/min": min(rewards),
        "grpo_actor/task_reward/max": max(rewards),
        "rollout/reward": fmean(rewards),
        "rollout/accepted": float(len(batch.groups)),
        "rollout/failed": float(batch.failed),
        "rollout/retried": float(batch.retried),
        "rollout/kept_tokens": float(batch.kept_tokens),
        "rollout/tokens": float(batch.generated_tokens),
        "rollout/tokens_per_s": batch.generated_tokens / (batch.generating_s or batch.seconds),
        "grpo_actor/n_seqs": float(sum(len(group.rollouts) for group in batch.groups)),
        "grpo_actor/seq_len/avg": fmean(lengths),
        "grpo_actor/seq_len/max": float(max(lengths)),
        "grpo_actor/no_eos_ratios/avg": fmean(cut),
        "grpo_actor/flat_groups/avg": fmean(group.is_flat for group in batch.all_groups),
        "rollout/hedged": float(batch.hedged),
        **({"rollout/unanswered": float(batch.unanswered)} if batch.unanswered else {}),
        **({"rollout/reward_timeouts": float(batch.late)} if batch.late else {}),
        **({"rollout/filtered": float(len(batch.filtered))} if batch.filtered else {}),
        **_of_episodes(batch),
        **{f"reward_by_dataset/{name}/avg": value for name, value in batch.rewards_by_dataset.items()},
        **{f"reward_parts/{name}/avg": value for name, value in _mean_parts(batch).items()},
        **stats.metrics(),
    }


def _of_episodes(batch: RolloutBatch) -> dict[str, float]:
    episodes = [rollout for rollout in batch.rollouts if rollout.segments]
    if not episodes:
        return {}
    return {
        "rollout/turns/avg": fmean(episode.turns for episode in episodes),
        "rollout/segments/avg": fmean(len(episode.segments) for episode in episodes),
    }


def _mean_parts(batch: RolloutBatch) -> dict[str, float]:
    """Over the completions that have the part: a function may answer others for other prompts."""
    names = dict.fromkeys(name for rollout in batch.rollouts for name in rollout.parts)
    return {name: fmean(one.parts[name] for one in batch.rollouts if name in one.parts) for name in names}
