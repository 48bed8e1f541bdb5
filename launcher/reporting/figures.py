"""Every figure of every step, and curves of them: at most about MOST_POINTS points, with the range behind each point.

A figure is a number of metrics.jsonl, by its key. What is no finite number is no point; it is counted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from launcher.run_files.journal import Record
from launcher.run_log.line_values import as_float

MOST_POINTS = 600
NO_FIGURES = frozenset({"global_step", "attempt", "time", "epoch", "epoch_step", "policy_version", "lineage"})
WRITTEN_OUT = frozenset({"NaN", "Infinity", "-Infinity"})
DIGITS = 6

CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "reward", ("rollout/reward",)),
    ("KL of old and new policy in a step", "nats", ("grpo_actor/approx_kl/avg",)),
    ("KL to the reference model", "nats", ("grpo_actor/kl_ref/avg",)),
    ("Entropy", "nats", ("grpo_actor/entropy/avg",)),
    ("Gradient norm", "", ("grpo_actor/grad_norm",)),
    ("Learning rate", "", ("grpo_actor/lr",)),
    ("Clip ratio", "share", ("grpo_actor/clip_ratio/low", "grpo_actor/clip_ratio/high")),
    ("Length of completions", "tokens", ("grpo_actor/seq_len/avg", "grpo_actor/seq_len/max")),
    ("Cut off, and groups without a signal", "share", ("grpo_actor/no_eos_ratios/avg", "grpo_actor/flat_groups/avg")),
    (
        "Seconds of a step",
        "s",
        tuple(f"timeperf/{part}_s" for part in ("step", "rollout", "train", "publish", "state", "checkpoint")),
    ),
    ("Tokens per second", "tokens/s", ("rollout/tokens_per_s",)),
    ("Loss", "", ("grpo_actor/loss",)),
    (
        "Server's and trainer's log-probs apart",
        "nats",
        ("grpo_actor/logprob_distance/avg", "grpo_actor/logprob_distance/max"),
    ),
    ("Importance weight", "", ("grpo_actor/importance_weight/avg",)),
    ("Requests failed and retried", "", ("rollout/failed", "rollout/retried")),
)
"""Title, unit and keys. Each further figure has a chart of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steps that are asked for, both included; None: from the first, to the last."""

    first: int | None = None
    last: int | None = None


class Figures:
    """The figures of all committed steps, undone ones too, in the order of the file."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values: dict[str, array[float]] = {}

    def add(self, step: int, line: Record) -> None:
        before = len(self._steps)
        self._steps.append(step)
        for key, value in line.items():
            if key in NO_FIGURES or not (type(value) is float or _is_figure(value)):
                continue
            column = self._values.get(key)
            if column is None:
                column = self._values[key] = array("d")
            if len(column) < before:
                column.extend([math.nan] * (before - len(column)))
            column.append(value if type(value) is float else as_float(value))

    @property
    def keys(self) -> list[str]:
        return sorted(self._values)

    def total(self, key: str) -> float:
        """Of all lines, undone ones too."""
        values = self._column(key) if key in self._values else np.zeros(0)
        return float(values[np.isfinite(values)].sum())

    def kept(self, restores: Iterable[tuple[int, int]]) -> np.ndarray:
        """Which lines are current. `restores`: before each so many lines were written, and the step it went back to."""
        steps = np.array(self._steps, dtype=np.int64)
        if not len(steps):
            return np.zeros(0, dtype=bool)
        later = np.append(steps[1:], np.iinfo(np.int64).max)
        for after, step in restores:
            later[after - 1] = min(later[after - 1], step + 1)
        return steps < np.minimum.accumulate(later[::-1])[::-1]

    def curves(
        self, kept: np.ndarray, window: Window = Window(), *, since: int | None = None, width: int | None = None
    ) -> dict[str, object]:
        """Bins of `width` steps (by default the width that a screen needs). `since`: from that step's bin on alone;
        `not_finite` is of the whole window all the same."""
        steps = np.array(self._steps, dtype=np.int64)
        inside = kept & (steps >= (window.first or 0))
        if window.last is not None:
            inside &= steps <= window.last
        chosen = np.flatnonzero(inside)
        width = width or _width(steps[chosen])
        infinite = {key: int(np.isinf(self._column(key)[chosen]).sum()) for key in self.keys}
        if since is not None:
            chosen = chosen[steps[chosen] >= since // width * width]
        bins = steps[chosen] // width
        starts = np.flatnonzero(np.diff(bins, prepend=-1)) if len(chosen) else np.zeros(0, dtype=np.int64)
        x = bins[starts] * width + (width - 1) / 2
        found: dict[str, object] = {"width": width, "x": x.tolist(), "steps": len(chosen)}
        found["series"] = {
            key: {"not_finite": infinite[key], **_series(self._column(key)[chosen], starts, width)} for key in self.keys
        }
        return found

    def undone(self, kept: np.ndarray, key: str, window: Window = Window()) -> list[tuple[float, float]]:
        """Points of steps that a restore undid, thinned to MOST_POINTS."""
        if key not in self._values:
            return []
        steps, values = np.array(self._steps, dtype=np.int64), self._column(key)
        gone = np.flatnonzero(~kept & np.isfinite(values) & (steps >= (window.first or 0)))
        if window.last is not None:
            gone = gone[steps[gone] <= window.last]
        gone = gone[:: max(-(-len(gone) // MOST_POINTS), 1)]
        return sorted(zip(steps[gone].astype(float).tolist(), values[gone].tolist(), strict=True))

    def _column(self, key: str) -> np.ndarray:
        column = np.array(self._values[key])
        return np.append(column, np.full(len(self._steps) - len(column), np.nan))


def charts_of(keys: list[str]) -> list[dict[str, object]]:
    """Which charts there are of these keys; those without a place of their own last, as `is_further`."""
    placed = {key for _, _, named in CHARTS for key in named}
    first = [
        {"title": title, "unit": unit, "keys": [key for key in named if key in keys], "is_further": False}
        for title, unit, named in CHARTS
        if not {*named}.isdisjoint(keys)
    ]
    return first + [{"title": key, "unit": "", "keys": [key], "is_further": True} for key in keys if key not in placed]


def _is_figure(value: object) -> bool:
    if isinstance(value, str):
        return value in WRITTEN_OUT
    return isinstance(value, int | float) and not isinstance(value, bool)


def _width(steps: np.ndarray) -> int:
    """1, 2, 5, 10, …: round, so that it changes seldom while a run grows."""
    most = (int(steps[-1] - steps[0]) + 1) / MOST_POINTS if len(steps) else 1.0
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= most:
                return factor * power
        power *= 10


def _series(values: np.ndarray, starts: np.ndarray, width: int) -> Mapping[str, object]:
    """Mean of each bin, and where it holds several steps the lowest and the highest."""
    if not len(starts):
        return {"mean": []}
    is_finite = np.isfinite(values)
    known = np.where(is_finite, values, np.nan)
    if width == 1:
        return {"mean": _rounded(known)}
    counts = np.add.reduceat(is_finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.where(is_finite, values, 0.0), starts) / counts
    low, high = np.fmin.reduceat(known, starts), np.fmax.reduceat(known, starts)
    return {"mean": _rounded(mean), "low": _rounded(low), "high": _rounded(high)}


def _rounded(values: np.ndarray) -> list[float | None]:
    """Short in JSON, and None where there is none."""
    return [None if math.isnan(value) else float(f"{value:.{DIGITS}g}") for value in values.tolist()]
