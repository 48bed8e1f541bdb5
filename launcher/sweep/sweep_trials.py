"""Makes the trials of a sweep from its overrides: the name and the arguments of each run. Pure.

A trial's name follows from its overrides alone, so that a sweep started again finds the runs that it has made, and one
with more values keeps those that it had.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.policy.memory_backoff import KINDS
from launcher.resources.memory_history import SETTINGS

Overrides = Sequence[str]

NOT_OF_A_TRIAL = ("trial_name", "dry_run", "cluster.fileroot", "cluster.address", "sweep.", "stats_logger.", "alerts.")
"""Overrides that change where a trial runs or who is notified, and not what it is."""

MEMORY_KEYS = frozenset({*SETTINGS, *KINDS})
KEEP_MEMORY = {"memory.give_way": "false", "memory.remember": "false"}
"""In a sweep over memory settings the ladder would change what is being swept, and what one trial has learnt would
change the next."""

NO_STANDBY = {"recovery.standby_trainers": "0"}
"""Where it is left to the plan: a trial's plan does not know of the memory that the trials beside it take."""

LONGEST_NAME = 128
DIGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTrial:
    """`settings`: the swept keys with this trial's values. `overrides`: all that its run is given."""

    name: str
    settings: Mapping[str, str]
    overrides: tuple[str, ...]

    def with_typed(self, values: Mapping[str, str]) -> SweepTrial:
        """The trial with these settings as if typed; its name stays."""
        return replace(self, overrides=(*self.overrides, *(f"{key}={value}" for key, value in values.items())))

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """`name` stays the same when values are added to the swept keys."""

    name: str
    trials: tuple[SweepTrial, ...]
    keys: tuple[str, ...]

    @property
    def is_over_memory(self) -> bool:
        return bool(MEMORY_KEYS & set(self.keys))


def plan_sweep(combinations: Sequence[Overrides]) -> Sweep:
    """The sweep over these combinations of overrides, each as Hydra's sweeper gives them; a doubled one runs once."""
    given = [dict(map(_split, overrides)) for overrides in combinations]
    keys = tuple(key for key in given[0] if len({one.get(key) for one in given}) > 1)
    kept = (KEEP_MEMORY if MEMORY_KEYS & set(keys) else {}) | NO_STANDBY
    trials: dict[str, SweepTrial] = {}
    for overrides, values in zip(combinations, given, strict=True):
        name = trial_name(values, keys)
        trials[name] = SweepTrial(
            name=name,
            settings={key: values[key] for key in keys},
            overrides=(
                *(override for override in overrides if _split(override)[0] != "trial_name"),
                f"trial_name={name}",
                *(f"{key}={value}" for key, value in kept.items() if key not in values),
            ),
        )
    constant = {key: value for key, value in given[0].items() if key not in keys}
    head = constant.get("trial_name") or "_".join(_last(key) for key in keys) or "sweep"
    return Sweep(name=_named(head, [sorted(keys), _what_it_is(constant)]), trials=tuple(trials.values()), keys=keys)


def trial_name(values: Mapping[str, str], keys: Iterable[str]) -> str:
    """What was swept, to be read, and a digest of all that makes the trial what it is."""
    parts = [values["trial_name"]] if "trial_name" in values else []
    parts += [f"{_last(key)}-{values[key]}" for key in keys if key != "trial_name"]
    return _named("_".join(parts) or "sweep", _what_it_is(values))


def _what_it_is(values: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((key, value) for key, value in values.items() if not key.startswith(NOT_OF_A_TRIAL))


def _named(head: str, of: object) -> str:
    digest = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:DIGEST]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", head).lstrip("._-") or "sweep"
    return f"{safe[: LONGEST_NAME - DIGEST - 1]}-{digest}"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value
