"""What to change so that it does not happen again; for memory the next rung of policy/memory_backoff.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.config.settings import as_typed
from launcher.config.supervision import MemoryConfig
from launcher.diagnosis.judging.rules import REMEDIES, Guess
from launcher.policy import memory_backoff
from launcher.policy.exit_cause import RanOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """`change`: what to do, as text. `overrides`: settings as `key=value`, where one is known to help."""

    change: str
    overrides: tuple[str, ...] = ()


LADDERS: Mapping[RanOut, str] = {
    RanOut.SERVER_DEVICE: "lower sglang.mem_fraction_static (0.8 → 0.7 → 0.6 → 0.5 → 0.4), then halve "
    "rollout.max_concurrent_rollouts",
    RanOut.SERVER_POOL: "halve rollout.max_concurrent_rollouts, then raise sglang.mem_fraction_static",
    RanOut.SERVER_POOL_TOO_SMALL: "raise sglang.mem_fraction_static: at start-up no room was left for the cache, "
    "which needs the opposite of what other shortages need",
    RanOut.SERVER_HOST: "halve sglang.max_total_tokens, then rollout.max_concurrent_rollouts; or give the host more "
    "memory",
    RanOut.TRAINER_DEVICE: "halve actor.mb_spec.max_tokens_per_mb down to the longest sequence, then "
    "actor.gradient_checkpointing=true, then a lower sglang.mem_fraction_static where they share the GPU",
    RanOut.TRAINER_HOST: "halve actor.mb_spec.max_tokens_per_mb, then actor.gradient_checkpointing=true; "
    "or give the host more memory",
}


def remedy_of(
    guess: Guess | None,
    settings: Mapping[str, object],
    *,
    ran_out: RanOut | None = None,
    place: tuple[str, str] = ("", ""),
) -> Remedy:
    """`settings`: the run's by their dotted keys, as far as they are known. `ran_out`, `place`: of memory."""
    if guess is None:
        return Remedy(change="nothing in the logs shows what to change")
    if guess is not Guess.OUT_OF_MEMORY:
        change, override = REMEDIES[guess]
        return Remedy(change=change, overrides=tuple(filter(None, [override(settings)])))
    if ran_out is None and place == ("", "host"):
        return Remedy(
            change="give the host, or the cgroup that the kernel's line names, more memory. Which of the run's "
            "processes it killed is not in its name: compare the pid with those in the run's logs"
        )
    return _of_memory(ran_out or _ran_out_at(place), settings, place)


def _ran_out_at(place: tuple[str, str]) -> RanOut:
    """Where the lines themselves don't contain it."""
    is_trainers = place[0] == "trainer" and place[1] in ("startup", "training", "transfer")
    return RanOut.TRAINER_DEVICE if is_trainers else RanOut.SERVER_DEVICE


def _of_memory(ran_out: RanOut, settings: Mapping[str, object], place: tuple[str, str]) -> Remedy:
    change = LADDERS[ran_out]
    if place[1] == "transfer":
        change += ". It ran out while weights were transferred: both copies must fit for that moment"
    if not settings:  # no config.yaml: the next rung is not known
        return Remedy(change=change)
    rung = memory_backoff.next_rung(ran_out, _memory_settings(settings), (), MemoryConfig())
    return Remedy(change=change, overrides=tuple(f"{key}={as_typed(value)}" for key, value in rung.overrides.items()))


def _memory_settings(settings: Mapping[str, object]) -> memory_backoff.MemorySettings:
    """The run's own, and defaults for what its config.yaml lacks."""
    longest = _int(settings, "gconfig.max_new_tokens", 0) + _int(settings, "train_dataset.max_length", 0)
    tokens, fraction = settings.get("sglang.max_total_tokens"), settings.get(memory_backoff.MEM_FRACTION)
    return memory_backoff.MemorySettings(
        mem_fraction_static=float(fraction) if isinstance(fraction, int | float) else 0.8,
        max_total_tokens=tokens if isinstance(tokens, int) else None,
        max_concurrent_rollouts=_int(settings, memory_backoff.CONCURRENCY, 64),
        max_tokens_per_mb=_int(settings, memory_backoff.MICRO_BATCH, 16384),
        gradient_checkpointing=settings.get(memory_backoff.CHECKPOINTING) is True,
        max_new_tokens=_int(settings, memory_backoff.NEW_TOKENS, 1024),
        n_samples=_int(settings, memory_backoff.SAMPLES, 4),
        longest_sequence=longest or 1024,
        on_gpu=settings.get("sglang.device") != "cpu",
        shares_gpu=True,
    )


def _int(settings: Mapping[str, object], key: str, otherwise: int) -> int:
    value = settings.get(key)
    return value if isinstance(value, int) else otherwise
