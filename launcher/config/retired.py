"""Settings whose mechanism has gone. For one version each is still accepted, and one line says that it does nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

RETIRED: Mapping[str, str] = {
    "actor.use_remove_padding": "sequences of like length share a micro-batch, of which 1 to 4 % is padding",
    "disk.forget_s": "a disk's trouble counts from the first that was met after the last committed step",
    "gate.older_weights": "tokens of older weights are compared with those of today (gate.distance_unknown)",
    "health.slow_factor": "how fast a server generates is not judged: nothing was done about it",
    "keep_alive": "a driver that is killed is always begun again (restart.driver)",
    "memory.warn_before_s": "the host's memory is reported once when 90 % of it is in use",
    "recovery.quarantine_gpus": "a server whose GPU fails is restarted on the same one, and given up where that fails",
    "restart.fleet": "a server is restarted by itself (restart.server), and a new attempt starts all (restart.attempt)",
    "recovery.standby_servers": "all servers serve (sglang.n_servers), and the others go on when one is lost",
}
"""Each key, and what takes its place: a sentence."""


def without_retired(values: dict[str, Any]) -> list[str]:
    """Take the retired keys out of `values`, by sections; those that were there."""
    found = []
    for key in RETIRED:
        *sections, name = key.split(".")
        section: Any = values
        for one in sections:
            section = section.get(one) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            del section[name]
            found.append(key)
    return found


@functools.cache  # a sweep composes each of its trials
def report_retired(key: str) -> None:
    """That it does nothing, once."""
    print(f"note: {key} does nothing any more: {RETIRED[key]}", file=sys.stderr)
