"""What a fault of another project's trainer, or of its servers, cost, as its files tell (adapter_storm)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from launcher.run_files.journal import Record, number_of, read_events
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import written_steps
from launcher.run_log.step_line import StepLine

OOM = "oom"
ENDS_IT, STARTS = frozenset({"kill", "stop", OOM}), "trainer.starting"
HTTP_ERROR = re.compile(rb"HTTP request to \S+ (?:failed|timed out)")
DROPPED = re.compile(rb"Workflow execution failed")
"""As AReaL's client says it."""
NOTICED = frozenset({"server.died", "health.dead", "trainer.died", "incident.began"})
AGAIN = frozenset({"trainer.resumed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCost:
    """Of a fault: seconds to the first step that was new, None where none came, and by how many seconds that step came
    later than after the median time of a step; steps that were taken again; seconds until an event told of it, and
    until the trainer was started again; and what its log says of its requests from the fault to that step."""

    after_step: int
    seconds: float | None
    late_s: float | None = None
    steps_again: int
    noticed_s: float | None = None
    restarted_s: float | None = None
    http_errors: int = 0
    groups_dropped: int = 0


def fault_cost(paths: RunPaths, log: Path, begin: int, moment: float, fault: str) -> FaultCost:
    """`begin`: bytes of the trainer's log before the fault."""
    with log.open("rb") as text:
        text.seek(begin)
        said = text.read()
    events = list(read_events(paths.events))
    return dataclasses.replace(
        cost_of(written_steps(paths), moment, begins_again(paths, moment, fault)),
        noticed_s=_seconds_to(events, NOTICED, moment),
        restarted_s=_seconds_to(events, AGAIN, moment),
        http_errors=len(HTTP_ERROR.findall(said)),
        groups_dropped=len(DROPPED.findall(said)),
    )


def _seconds_to(events: Sequence[Record], names: Set[str], moment: float) -> float | None:
    times = [number_of(event.get("time")) for event in events if event["event"] in names]
    return next((round(time - moment, 1) for time in times if time >= moment), None)


def cost_of(steps: Sequence[StepLine], at: float, since: float | None = None) -> FaultCost:
    """`steps`: all that were written. `at`: unix seconds of the fault, `since`: from when on a step can be new."""
    begin = at if since is None else since
    seen = [(one.time, one.step) for one in steps if one.time]
    last = max((step for moment, step in seen if moment < begin), default=-1)
    new = next((moment for moment, step in seen if moment >= begin and step > last), None)
    again = sum(begin <= moment and step <= last for moment, step in seen if new is None or moment < new)
    if new is None:
        return FaultCost(after_step=last, seconds=None, steps_again=again)
    times = [one.step_s for one in steps if math.isfinite(one.step_s)]
    before = max((moment for moment, _ in seen if moment < begin), default=math.nan)
    late = new - before - median(times) if times and math.isfinite(before) else None
    return FaultCost(
        after_step=last,
        seconds=round(new - at, 1),
        late_s=None if late is None else round(late, 1),
        steps_again=again,
    )


def begins_again(paths: RunPaths, moment: float, fault: str) -> float:
    """What a trainer had said before it was killed is read after it: its next incarnation's steps are new."""
    if fault not in ENDS_IT:
        return moment
    started = [number_of(event.get("time")) for event in read_events(paths.events) if event["event"] == STARTS]
    return next((time for time in started if time >= moment), math.inf)
