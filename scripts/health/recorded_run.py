"""What a run's own files record: its state, servers, incidents and steps. Read once, before any process is queried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from launcher.base.errors import StorageError
from launcher.base.wording import lines_not_read
from launcher.policy.reward_health import RewardPoint
from launcher.reporting.event_lines import what_happened
from launcher.run_files.journal import read_lines
from launcher.run_files.line_tail import LineTail
from launcher.run_files.run_order import RESTORED, place_events
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of
from launcher.run_log.line_values import as_float, as_integer, as_unix_time

TAIL_BYTES = 2 * 2**20
SERVER_STATES = {
    "server.starting": "STARTING",
    "server.restarting": "STARTING",
    "server.ready": "READY",
    "server.died": "DEAD",
    "server.abandoned": "ABANDONED",
    "server.leaving": "LEAVING",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """`state`: READY, STARTING, DEAD, ABANDONED or LEAVING."""

    state: str
    url: str = ""
    pid: int | None = None


@dataclass(slots=True, kw_only=True)
class RecordedRun:
    """The last attempt by its journal. `status`: "" until the run has ended. `ended_at`: the time of its last event.
    `pids`: of all its processes; `deaths`: how many of them died. `ran_out`: what ran out of memory.
    `restored_step`: of the last restore from an onset.
    `held`: by whom and why a pause was asked for that holds. `waits`: what keeps the trainer from its next step, by who
    said it. `not_read`: lines that say nothing."""

    started_at: float = 0.0
    ended_at: float = 0.0
    status: str = ""
    reason: str = ""
    state: str = ""
    state_reason: str = ""
    held: str = ""
    waits: dict[str, tuple[float, str]] = field(default_factory=dict)
    restored_step: int | None = None
    servers: dict[str, ServerRecord] = field(default_factory=dict)
    incidents: dict[int, str] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    deaths: int = 0
    ran_out: list[str] = field(default_factory=list)
    total_steps: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    not_read: str = ""

    def setting(self, key: str) -> object:
        """As the run wrote it down; None where it didn't."""
        return setting_of(self.settings, key)

    def take(self, event: Mapping[str, object]) -> None:
        """Update from the attempt's next event."""
        name, subject, reason = str(event.get("event")), str(event.get("subject")), str(event.get("reason") or "")
        pid, number = as_integer(event.get("pid")), as_integer(event.get("incident"))
        self.ended_at = max(self.ended_at, as_unix_time(event.get("time")))
        self.deaths += name in ("server.died", "trainer.died")
        if pid is not None:
            self.pids.add(pid)
        match name:
            case "run.started":
                self.started_at, self.state, self.state_reason = as_unix_time(event.get("time")), "INITIALIZING", reason
            case "run.finished" | "run.errored" | "run.aborted":
                self.status, self.reason = name.removeprefix("run.").upper(), reason
                last = as_integer(event.get("global_step"))
                if name == "run.finished" and self.total_steps and last is not None:
                    self.total_steps = min(self.total_steps, last + 1)  # data may end before: actor.dynamic_sampling
            case "run.hold_asked" | "run.hold_released":
                self.held = reason if name == "run.hold_asked" else ""
            case "gate.waiting":
                self.waits["gate"] = as_unix_time(event.get("time")), f"the trainer waits at the gate: {reason}"
            case "step.late":
                self.waits["step"] = as_unix_time(event.get("time")), reason
            case "gate.answered" | "step.came":
                self.waits.pop(name.partition(".")[0], None)
            case "trainer.died":  # nobody is left to say that it is over
                self.waits.clear()
            case "server.ready":
                url = str(event.get("url") or "")
                self.servers[subject] = ServerRecord(state=SERVER_STATES[name], url=url, pid=pid)
            case "server.left":  # as requested: it is not missing
                self.servers.pop(subject, None)
            case "server.leaving" if subject not in self.servers:
                pass
            case _ if name in SERVER_STATES:
                self.servers[subject] = ServerRecord(state=SERVER_STATES[name])
            case "incident.began" if number is not None:
                self.incidents[number] = f"incident {number}: {what_happened(event)}"
            case "incident.ended" if number is not None:
                self.incidents.pop(number, None)
            case "repair.begun" if as_integer(event.get("onset_step")) is not None:
                self.restored_step = as_integer(event.get("restored_step"))
            case "memory.ran_out":
                self.ran_out.append(f"{subject} ({event.get('ran_out')})")
            case "trainer.started":
                self.total_steps = as_integer(event.get("total_steps"))
        if name.startswith("run.") and isinstance(state := event.get("state"), str):
            self.state, self.state_reason = state, reason


def read_view(paths: RunPaths) -> RecordedRun:
    file = read_lines(paths.events)
    events = list(file)
    last = max((number for event in events if (number := as_integer(event.get("attempt"))) is not None), default=0)
    view = RecordedRun(
        settings=read_run_settings(paths), not_read=lines_not_read(file.skipped, file.path, file.first_skipped)
    )
    for event in events:
        if as_integer(event.get("attempt")) == last:
            view.take(event)
    return view


def read_run_settings(paths: RunPaths) -> Mapping[str, object]:
    """Those of the last attempt that had others than the first. Raises StorageError."""
    found = list(paths.logs.glob("config.attempt*.yaml"))
    if lost := [path for path in found if not path.exists()]:
        raise StorageError(f"{lost[0]} is a link to a file that is not there", "remove it, or put that file back")
    files = sorted(found, key=lambda path: path.stat().st_mtime)
    return read_settings(files[-1] if files else paths.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSteps:
    """The end of metrics.jsonl. `rewards`: of a step that was repeated, the last. `unread`: why none could be read."""

    last_step: int | None
    last_at: float | None
    policy_version: int | None
    usual_step_s: float | None
    rewards: tuple[RewardPoint, ...]
    not_read: str = ""
    unread: str = ""


def read_steps(path: Path) -> LastSteps:
    tail = _tail(path)
    lines = [line for line in tail.read() if as_integer(line.get("global_step")) is not None]
    seconds = [value for line in lines if math.isfinite(value := as_float(line.get("timeperf/step_s")))]
    last: Mapping[str, object] = lines[-1] if lines else {}
    return LastSteps(
        last_step=as_integer(last.get("global_step")),
        last_at=as_unix_time(last.get("time")) or None,
        policy_version=as_integer(last.get("policy_version")),
        usual_step_s=median(seconds) if seconds else None,
        rewards=_rewards(lines),
        not_read=lines_not_read(tail.skipped, path),
        unread=_why_unread(path),
    )


def _why_unread(path: Path) -> str:
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return ""  # before the first step there is none
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror}"
    return ""


def _rewards(lines: Sequence[Mapping[str, object]]) -> tuple[RewardPoint, ...]:
    """Where only a step's mean is recorded, it counts as each of its rewards."""
    points: list[RewardPoint] = []
    for line in lines:
        step, mean = as_integer(line.get("global_step")), as_float(line.get("rollout/reward"))
        if step is None or not math.isfinite(mean):
            continue
        while points and points[-1].step >= step:
            points.pop()
        low, high = (as_float(line.get(f"grpo_actor/task_reward/{key}")) for key in ("min", "max"))
        known = math.isfinite(low) and math.isfinite(high)
        points.append(RewardPoint(step=step, mean=mean, low=low if known else mean, high=high if known else mean))
    return tuple(points)


def trainer_version(paths: RunPaths) -> int | None:
    """The weights that servers should hold: after the last step, or after a restore that no step has followed yet."""
    steps = [line for line in _tail(paths.metrics).read() if as_integer(line.get("global_step")) is not None]
    events = (event for event in _tail(paths.events).read() if event.get("event") == RESTORED)
    restores = place_events(events, steps, lambda line: line)
    if restores and restores[-1].after == len(steps):
        step = as_integer(restores[-1].event.get("global_step"))
        return None if step is None else step + 1
    return as_integer(steps[-1].get("policy_version")) if steps else None


def _tail(path: Path) -> LineTail:
    """Of the records in the last TAIL_BYTES of a file, however long it is."""
    size = path.stat().st_size if path.exists() else 0
    return LineTail(path, since=max(size - TAIL_BYTES, 0))
