"""What a run's own files say of it now: its state, its servers, its steps. Read once, before anything is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import yaml

from launcher.reporting.event_lines import what_happened
from launcher.reporting.run_reader import as_float, as_integer, as_unix_time
from launcher.run_files.journal import read_lines
from launcher.run_files.line_tail import LineTail
from launcher.run_files.run_paths import RunPaths

TAIL_BYTES = 2 * 2**20
LAST_STEPS = 10
DIED = ("server.died", "trainer.died")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSaid:
    """`state`: READY, STARTING, DEAD, ABANDONED or LEAVING."""

    state: str
    url: str = ""
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthView:
    """Of the last attempt. `ended_at`: the last that is known of it. `deaths`: how many of its processes died. `pids`:
    all that it named."""

    started_at: float
    ended_at: float
    word: str
    reason: str
    state: str
    state_reason: str
    servers: Mapping[str, ServerSaid]
    open_incidents: tuple[str, ...]
    pids: frozenset[int]
    deaths: int
    ran_out: tuple[str, ...]
    total_steps: int | None
    settings: Mapping[str, object]

    @property
    def has_begun(self) -> bool:
        return self.started_at > 0

    def setting(self, section: str, key: str) -> object:
        """As the run wrote it down; None where it didn't."""
        part = self.settings.get(section)
        return part.get(key) if isinstance(part, dict) else None


def read_view(paths: RunPaths) -> HealthView:
    events = list(read_lines(paths.events))
    attempts = [number for event in events if (number := as_integer(event.get("attempt"))) is not None]
    mine = [event for event in events if as_integer(event.get("attempt")) == max(attempts, default=0)]
    view = HealthView(
        started_at=0.0, ended_at=0.0, word="", reason="", state="", state_reason="", servers={}, open_incidents=(),
        pids=frozenset(), deaths=0, ran_out=(), total_steps=None, settings=_settings(paths),
    )  # fmt: skip
    servers: dict[str, ServerSaid] = {}
    incidents: dict[int, str] = {}
    for event in mine:
        view = _take(view, event, servers, incidents)
    return replace(view, servers=dict(sorted(servers.items())), open_incidents=tuple(incidents.values()))


def _take(
    view: HealthView, event: Mapping[str, object], servers: dict[str, ServerSaid], incidents: dict[int, str]
) -> HealthView:
    name, subject, reason = str(event.get("event")), str(event.get("subject")), str(event.get("reason") or "")
    pid, number = as_integer(event.get("pid")), as_integer(event.get("incident"))
    view = replace(view, ended_at=max(view.ended_at, as_unix_time(event.get("time"))))
    if pid is not None:
        view = replace(view, pids=view.pids | {pid})
    match name:
        case "run.started":
            return replace(view, started_at=as_unix_time(event.get("time")), state="INITIALIZING", state_reason=reason)
        case "run.finished" | "run.errored" | "run.aborted":
            return replace(view, word=name.removeprefix("run.").upper(), reason=reason)
        case "server.starting" | "server.restarting":
            servers[subject] = ServerSaid(state="STARTING")
        case "server.ready":
            servers[subject] = ServerSaid(state="READY", url=str(event.get("url") or ""), pid=pid)
        case "server.died":
            servers[subject] = ServerSaid(state="DEAD")
        case "server.abandoned":
            servers[subject] = ServerSaid(state="ABANDONED")
        case "server.leaving" if subject in servers:
            servers[subject] = ServerSaid(state="LEAVING")
        case "server.left":  # as it was asked to: none that is missing
            servers.pop(subject, None)
        case "incident.began" if number is not None:
            incidents[number] = f"incident {number}: {what_happened(event)}"
        case "incident.ended" if number is not None:
            incidents.pop(number, None)
        case "memory.ran_out":
            view = replace(view, ran_out=(*view.ran_out, f"{subject} ({event.get('ran_out')})"))
        case "trainer.started":
            view = replace(view, total_steps=as_integer(event.get("total_steps")))
    if name in DIED:
        view = replace(view, deaths=view.deaths + 1)
    if name.startswith("run.") and isinstance(state := event.get("state"), str):
        view = replace(view, state=state, state_reason=reason)
    return view


def _settings(paths: RunPaths) -> Mapping[str, object]:
    """Those of the last attempt that had others than the first."""
    try:
        files = sorted(paths.logs.glob("config.attempt*.yaml"), key=lambda path: path.stat().st_mtime)
        settings = yaml.safe_load((files[-1] if files else paths.config).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSeen:
    """The end of metrics.jsonl."""

    last_step: int | None
    last_at: float | None
    policy_version: int | None
    usual_step_s: float | None
    last_rewards: tuple[float, ...]


def read_steps(path: Path) -> StepsSeen:
    lines = [line for line in last_lines(path) if as_integer(line.get("global_step")) is not None]
    seconds = [value for line in lines if math.isfinite(value := as_float(line.get("timeperf/step_s")))]
    rewards = [value for line in lines[-LAST_STEPS:] if math.isfinite(value := as_float(line.get("rollout/reward")))]
    last: Mapping[str, object] = lines[-1] if lines else {}
    return StepsSeen(
        last_step=as_integer(last.get("global_step")),
        last_at=as_unix_time(last.get("time")) or None,
        policy_version=as_integer(last.get("policy_version")),
        usual_step_s=median(seconds) if seconds else None,
        last_rewards=tuple(rewards),
    )


def trainer_version(paths: RunPaths) -> int | None:
    """The weights that servers should hold: after the last step, or after a restore that no step has followed yet."""
    steps = read_steps(paths.metrics)
    restored = [event for event in last_lines(paths.events) if event.get("event") == "trainer.restored"]
    if restored and as_unix_time(restored[-1].get("time")) > (steps.last_at or 0.0):
        step = as_integer(restored[-1].get("global_step"))
        return None if step is None else step + 1
    return steps.policy_version


def last_lines(path: Path) -> list[Mapping[str, object]]:
    """The records in the last TAIL_BYTES of a file, however long it is."""
    try:
        size = path.stat().st_size
    except OSError:
        return []
    return list(LineTail(path, since=max(size - TAIL_BYTES, 0)).read())
