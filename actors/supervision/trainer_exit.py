"""Why a trainer's process ended, asked of those who may know, as it can't say so itself any more: the kernel, Ray, and
its log. An allocation that fails in a step may fail in one of Ray's threads next, before anybody has heard of the step.
"""

from __future__ import annotations

import signal
from pathlib import Path

from actors.cluster.ray_oom_kills import killed_for_memory
from actors.serving.server_log_tail import decisive_lines, tail
from launcher.policy.exit_cause import ExitFinding, find_trainer_cause


async def why_it_ended(node: str, pid: int, *, oom_kills: int, log: Path, since: int) -> ExitFinding:
    """`oom_kills`: of the kernel, meanwhile. `since`: the byte of the log up to which all was well."""
    if oom_kills:
        return find_trainer_cause([], -signal.SIGKILL, oom_kills=oom_kills)
    said = decisive_lines(tail(log, since))
    return find_trainer_cause([*(await killed_for_memory(node, pid)).splitlines(), *said], None)
