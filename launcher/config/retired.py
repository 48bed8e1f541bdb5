"""Settings whose mechanism has gone. For one version each is still accepted, and one line says that it does nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

RETIRED: Mapping[str, str] = {
    "actor.use_remove_padding": "sequences of like length share a micro-batch, of which 1 to 4 % is padding",
    "disk.forget_s": "a disk's trouble counts from the first that was met after the last committed step",
    "gate.compared_rejections": "two batches in a row at most are rejected only because they differ from the usual",
    "gate.distance_factor": "in bfloat16 the limit of the distance is 4 times the run's usual one",
    "gate.older_weights": "tokens of older weights are compared with those of today (gate.distance_unknown)",
    "gate.usual_min_steps": "batches are compared with the usual from the 6th step on",
    "gate.usual_steps": "the medians of the last 20 steps count as usual",
    "health.lone_probe_factor": "while no client is known to wait, the allowed silence is 5 times as long",
    "health.slow_factor": "how fast a server generates is not judged: nothing was done about it",
    "keep_alive": "a driver that is killed is always begun again (restart.driver)",
    "memory.min_concurrent_rollouts": "rollout.max_concurrent_rollouts is halved down to 2",
    "memory.sample_interval_s": "memory is measured every 10 seconds",
    "memory.warn_before_s": "the host's memory is reported once when 90 % of it is in use",
    "recovery.quarantine_gpus": "a server whose GPU fails is restarted on the same one, and given up where that fails",
    "restore.same_place_collapses": "the third collapse at the same place halts the run",
    "reward_health.mend_patience_s": "where restored weights earn less than they did, another project's trainer halts, "
    "as this launcher's own does",
    "reward_health.mend_wait_s": "where restored weights earn less than they did, another project's trainer halts, "
    "as this launcher's own does",
    "reward_health.canary_silent_rounds": "two rounds in a row without a score show a broken reward function",
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
