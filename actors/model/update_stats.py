"""What one forward and backward pass over a batch found, before anything is committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDistance:
    """|server's log-prob - trainer's| over the completion tokens, in nats: does the server hold our weights?

    `by_server`: the mean of each one's tokens, by its URL; empty where one server made them all.
    """

    mean: float
    max: float
    by_server: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Figures of one batch. All means are over its completion tokens, clip fractions are shares of those.

    `grad_norm` is before clipping; `problems` names what is not finite, and such a batch must not be committed.
    `kl_ref` is None without a reference. `n_learning`: sequences whose advantage is not 0; none at all means that
    `commit` leaves the weights exactly as they are.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    clip_fraction_low: float
    clip_fraction_high: float
    ratio_mean: float
    approx_kl: float
    kl_ref: float | None
    entropy: float
    logprob_distance: LogprobDistance
    n_sequences: int
    n_learning: int
    n_tokens: int
    n_micro_batches: int
    problems: tuple[str, ...]

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
            "entropy/avg": self.entropy,
            "logprob_distance/avg": self.logprob_distance.mean,
            "logprob_distance/max": self.logprob_distance.max,
            "n_learning_seqs": float(self.n_learning),
            "n_tokens": float(self.n_tokens),
            "n_micro_batches": float(self.n_micro_batches),
            "update_successful": float(self.finite),
        }
        if self.kl_ref is not None:
            figures["kl_ref/avg"] = self.kl_ref
        return {f"grpo_actor/{name}": value for name, value in figures.items()}
