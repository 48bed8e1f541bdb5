"""Which settings to lower when memory runs out: where it ran out → the next rung of settings, or none.

    server, device    mem_fraction_static down → max_concurrent_rollouts halved            (on a GPU)
    server, pool      max_concurrent_rollouts halved → (pool up, where there is room for it)
    pool too small    mem_fraction_static up, max_total_tokens doubled on the CPU: start-up needs the opposite
    server, host      max_total_tokens halved → max_concurrent_rollouts halved
    trainer           max_tokens_per_mb halved, or the largest micro-batch that there was, down to the longest sequence
                      → gradient_checkpointing
                      → mem_fraction_static down, where a server shares the GPU
    only if allowed   max_new_tokens halved, n_samples halved: they change what is learned

Each rung is one change. A pool that goes up never comes back to where an allocation failed, nor does one that goes
down reach what was too small, and settings that failed are never tried again: with both ends known to fail no rung
is left, and the run ends with that reason instead of swinging.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from launcher.base.messages import Overrides
from launcher.config.schema import RunConfig
from launcher.config.supervision import MemoryConfig
from launcher.policy.exit_cause import RanOut

MIN_CONCURRENT_ROLLOUTS = 2
"""With one prompt in flight the servers idle while the last of its completions ends."""
MEM_FRACTION = "sglang.mem_fraction_static"
POOL_TOKENS = "sglang.max_total_tokens"
CONCURRENCY = "rollout.max_concurrent_rollouts"
MICRO_BATCH = "actor.mb_spec.max_tokens_per_mb"
CHECKPOINTING = "actor.gradient_checkpointing"
NEW_TOKENS = "gconfig.max_new_tokens"
SAMPLES = "gconfig.n_samples"

KINDS: Mapping[str, type] = {
    MEM_FRACTION: float,
    POOL_TOKENS: int,
    CONCURRENCY: int,
    MICRO_BATCH: int,
    CHECKPOINTING: bool,
    NEW_TOKENS: int,
    SAMPLES: int,
}
"""Of the value of each setting that may give way."""
OF_SERVERS = frozenset({MEM_FRACTION, POOL_TOKENS, CONCURRENCY, NEW_TOKENS, SAMPLES})
"""Settings on which a server's memory depends."""
AT_ITS_START = frozenset({MEM_FRACTION, POOL_TOKENS})
"""Those that it takes when it starts; the others are the trainer's to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """As the trainer has reported, in tokens: the longest sequence, prompt and completion, and the largest micro-batch
    so far, padding included. 0: not known."""

    longest_sequence: int = 0
    largest_micro_batch: int = 0

    def updated(self, longest_sequence: int, largest_micro_batch: int) -> Self:
        """A process that has just started knows neither: what was known stays."""
        return replace(
            self,
            longest_sequence=longest_sequence or self.longest_sequence,
            largest_micro_batch=largest_micro_batch or self.largest_micro_batch,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The settings in force that memory depends on.

    `on_gpu`: servers run on one. `shares_gpu`: with the trainer. `longest_sequence`: prompt and completion, tokens.
    `largest_micro_batch`: that the trainer has made, tokens, 0 where it has made none; observed, not a setting.
    """

    mem_fraction_static: float
    max_total_tokens: int | None
    max_concurrent_rollouts: int
    max_tokens_per_mb: int
    gradient_checkpointing: bool
    max_new_tokens: int
    n_samples: int
    longest_sequence: int
    on_gpu: bool
    shares_gpu: bool
    largest_micro_batch: int = field(default=0, compare=False)

    def changed(self, overrides: Overrides) -> Self:
        """These settings with a rung taken. A field has the last part of its setting's name."""
        fields: dict[str, Any] = {key.rpartition(".")[2]: value for key, value in overrides.items()}
        return replace(self, **fields)

    @classmethod
    def of(
        cls, config: RunConfig, *, longest_sequence: int, largest_micro_batch: int = 0, on_gpu: bool, shares_gpu: bool
    ) -> Self:
        return cls(
            mem_fraction_static=config.sglang.mem_fraction_static,
            max_total_tokens=config.sglang.max_total_tokens,
            max_concurrent_rollouts=config.rollout.max_concurrent_rollouts,
            max_tokens_per_mb=config.actor.mb_spec.max_tokens_per_mb,
            gradient_checkpointing=config.actor.gradient_checkpointing,
            max_new_tokens=config.gconfig.max_new_tokens,
            n_samples=config.gconfig.n_samples,
            longest_sequence=longest_sequence,
            largest_micro_batch=largest_micro_batch,
            on_gpu=on_gpu,
            shares_gpu=shares_gpu,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSettings:
    """Settings under which memory ran out, and where."""

    ran_out: RanOut
    settings: MemorySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRung:
    """One change of settings. `overrides` is empty where no rung is left."""

    overrides: Overrides
    reason: str


Changes = Iterator[tuple[str, float | int | bool]]
Known = Sequence[TriedSettings]


def next_rung(
    ran_out: RanOut, in_force: MemorySettings, tried: Known, config: MemoryConfig, least_fraction: float = 0.0
) -> MemoryRung:
    """The next change of the settings in force. `tried`: the failures of this host so far, also of earlier attempts.

    `least_fraction`: what a server that found no room has named as its least share of the GPU; 0 where it named none.
    """
    if ran_out is RanOut.SERVER_POOL_TOO_SMALL and least_fraction > in_force.mem_fraction_static:
        tried = [*tried, TriedSettings(ran_out=ran_out, settings=replace(in_force, mem_fraction_static=least_fraction))]
    known = [*tried, TriedSettings(ran_out=ran_out, settings=in_force)]
    steps = [*LADDERS[ran_out]]
    if config.change_learning and ran_out is not RanOut.SERVER_POOL_TOO_SMALL:
        steps.append(_learning)
    for step in steps:
        for key, value in step(in_force, known, config):
            if in_force.changed({key: value}) not in [failure.settings for failure in known]:
                return MemoryRung(overrides={key: value}, reason=f"{ran_out}: {key}={value}")
    return MemoryRung(overrides={}, reason=f"{ran_out}: no setting is left that could give way")


TOO_SMALL = (RanOut.SERVER_POOL_TOO_SMALL, RanOut.SERVER_POOL)
OF_THE_DEVICE = (RanOut.SERVER_DEVICE, RanOut.TRAINER_DEVICE)
OF_THE_HOST = (RanOut.SERVER_HOST, RanOut.TRAINER_HOST)


def _fraction_down(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    too_small = [t.settings.mem_fraction_static for t in known if t.ran_out is RanOut.SERVER_POOL_TOO_SMALL]
    lower = [f for f in config.mem_fraction_static if max(too_small, default=0.0) < f < m.mem_fraction_static]
    if m.on_gpu and lower:
        yield MEM_FRACTION, max(lower)


def _shared_fraction_down(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    if m.shares_gpu:
        yield from _fraction_down(m, known, config)


def _fraction_up(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    too_large = [t.settings.mem_fraction_static for t in known if t.ran_out in OF_THE_DEVICE]
    too_small = [t.settings.mem_fraction_static for t in known if t.ran_out is RanOut.SERVER_POOL_TOO_SMALL]
    least = max([m.mem_fraction_static, *too_small])
    higher = [f for f in config.mem_fraction_static if least < f < min(too_large, default=1.0)]
    if m.on_gpu and higher:
        yield MEM_FRACTION, min(higher)


def _tokens_down(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    if m.max_total_tokens is None:
        return
    too_small = [t.settings.max_total_tokens or 0 for t in known if t.ran_out in TOO_SMALL]
    half = max(m.max_total_tokens // 2, m.longest_sequence)
    if max(too_small, default=0) < half < m.max_total_tokens:
        yield POOL_TOKENS, half


def _tokens_up(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    if m.max_total_tokens is None:
        return
    too_large = [t.settings.max_total_tokens for t in known if t.ran_out in OF_THE_HOST]
    double = m.max_total_tokens * 2
    if all(limit is None or double < limit for limit in too_large):
        yield POOL_TOKENS, double


def _concurrency_down(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    half = max(m.max_concurrent_rollouts // 2, MIN_CONCURRENT_ROLLOUTS)
    if half < m.max_concurrent_rollouts:
        yield CONCURRENCY, half


def _trainer_down(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    # Half of a limit that no micro-batch has reached would change nothing, and cost a restart.
    largest = min(m.max_tokens_per_mb, m.largest_micro_batch or m.max_tokens_per_mb)
    half = max(largest // 2, m.longest_sequence)
    if half < largest:
        yield MICRO_BATCH, half
    if not m.gradient_checkpointing:
        yield CHECKPOINTING, True


def _learning(m: MemorySettings, known: Known, config: MemoryConfig) -> Changes:
    tokens, samples = max(m.max_new_tokens // 2, config.min_new_tokens), max(m.n_samples // 2, 2)
    if tokens < m.max_new_tokens:
        yield NEW_TOKENS, tokens
    if samples < m.n_samples:
        yield SAMPLES, samples


Step = Callable[[MemorySettings, Known, MemoryConfig], Changes]

LADDERS: Mapping[RanOut, tuple[Step, ...]] = {
    RanOut.SERVER_POOL_TOO_SMALL: (_fraction_up, _tokens_up),
    RanOut.SERVER_POOL: (_concurrency_down, _fraction_up, _tokens_up),
    RanOut.SERVER_DEVICE: (_fraction_down, _concurrency_down),
    RanOut.SERVER_HOST: (_tokens_down, _concurrency_down),
    RanOut.TRAINER_DEVICE: (_trainer_down, _shared_fraction_down),
    RanOut.TRAINER_HOST: (_trainer_down, _tokens_down),
}


def with_overrides(config: RunConfig, overrides: Overrides) -> RunConfig:
    """A copy of `config` with each dotted key set, as a rung has them. Raises KeyError for a key that is none."""
    changed = copy.deepcopy(config)
    for key, value in overrides.items():
        *parts, name = key.split(".")
        section: object = changed
        for part in parts:
            section = getattr(section, part)
        if not hasattr(section, name):
            raise KeyError(key)
        setattr(section, name, value)
    return changed
