"""The run itself: its word or its state, its steps, the processes that must be there, and those that must not."""

from __future__ import annotations

import time
from dataclasses import dataclass

from launcher.diagnosis.health.finding import CheckResult, Finding
from launcher.diagnosis.health.judge_run import RunSeen, judge_run
from launcher.run_files.run_paths import RunPaths
from scripts.faults.find import NotLive, RunProcesses, find_driver, find_servers, look
from scripts.health.view import HealthView, read_steps

SUPERVISORS = ("health_monitor", "coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked. `is_live` None: the driver is on another machine. `processes`: of a live run."""

    paths: RunPaths
    view: HealthView
    is_live: bool | None
    processes: RunProcesses | None
    timeout_s: float
    recent_s: float
    extra_servers: tuple[str, ...]


def find_subject(
    paths: RunPaths, view: HealthView, *, timeout_s: float, recent_s: float, extra_servers: tuple[str, ...] = ()
) -> Subject:
    is_live: bool | None = True
    processes = None
    try:
        find_driver(paths)
        processes = look(paths)
    except NotLive as error:
        is_live = None if " runs on " in error.message else False
    return Subject(
        paths=paths,
        view=view,
        is_live=is_live,
        processes=processes,
        timeout_s=timeout_s,
        recent_s=recent_s,
        extra_servers=extra_servers,
    )


def check_run(subject: Subject) -> list[Finding]:
    view, steps = subject.view, read_steps(subject.paths.metrics)
    if subject.is_live is False and not view.has_begun and steps.last_step is None:
        said = f"{subject.paths.logs} has no events.jsonl of a run"
        return [Finding(check="run", subject="state", verdict=CheckResult.UNKNOWN, said=said)]
    found = judge_run(
        RunSeen(
            is_live=subject.is_live,
            word="" if subject.is_live else view.word,  # a live one has begun anew, whatever was its last word
            reason=view.reason,
            state=view.state,
            state_reason=view.state_reason,
            open_incidents=view.open_incidents,
            last_step=steps.last_step,
            total_steps=view.total_steps,
            since_step_s=None if steps.last_at is None else max(time.time() - steps.last_at, 0.0),
            usual_step_s=steps.usual_step_s,
            last_rewards=steps.last_rewards,
        )
    )
    return found + (_processes(subject) if subject.is_live else _left_over(subject))


def _processes(subject: Subject) -> list[Finding]:
    """Trainer and supervisors; servers are asked one by one (look_servers.py)."""
    found = subject.processes
    assert found is not None
    missing = [name for name in SUPERVISORS if name not in found.supervisors]
    missing += [] if found.trainer is not None else ["trainer"]
    pids = {name: process.pid for name, process in found.supervisors.items()} | {"driver": found.driver.pid}
    if found.trainer is not None:
        pids["trainer"] = found.trainer.pid
    said = f"no process of {', '.join(missing)}" if missing else ", ".join(f"{n} {pid}" for n, pid in pids.items())
    verdict = CheckResult.OK
    if missing:
        verdict = CheckResult.UNKNOWN if subject.view.state in ("", "INITIALIZING") else CheckResult.BAD
    return [Finding(check="run", subject="processes", verdict=verdict, said=said, facts={"pids": pids})]


def _left_over(subject: Subject) -> list[Finding]:
    if subject.is_live is None:
        return []
    servers = list(find_servers(subject.paths))
    if not servers:
        return [Finding(check="run", subject="processes", verdict=CheckResult.OK, said="none is left, as it should be")]
    pids = {server.name: [process.pid for process in server.tree] for server in servers}
    said = f"the run has ended, and these go on: {', '.join(f'{n} {p}' for n, p in pids.items())}"
    return [Finding(check="run", subject="processes", verdict=CheckResult.BAD, said=said, facts={"pids": pids})]
