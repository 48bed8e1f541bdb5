"""The run itself: its last word by its journal, now.json of a live one, its processes here and those that it has left.

What a live run of ours says of its trainer and its rewards is the run's own judgement; for AReaL's, and for one that is
over, the steps are judged by the same rule (launcher/policy/reward_health.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass

from actors.foreign.foreign_process import mark_of
from actors.processes.process_tree import bearing
from launcher.base.findings import Finding, Severity
from launcher.base.messages import Health, Verdict
from launcher.base.rollouts import mean_of
from launcher.checkpoints.areal_log import read_servers
from launcher.config.supervision import RewardHealthConfig
from launcher.diagnosis.judging.seen_enough import STALL_MIN_S, STALL_STEPS
from launcher.policy.reward_health import judge_zeros
from launcher.reporting.current_status import CurrentStatus, RunHealth
from launcher.run_files.run_ends import GONE
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import foreign_trainer
from launcher.run_log.run_log import last_end
from scripts.health.areal_run import (
    ArealRun,
    areal_view,
    is_areals,
    judge_processes,
    live_of,
    read_areal,
    trial_of_logs,
)
from scripts.health.findings import BAD, NOTE, OK, UNKNOWN
from scripts.health.recorded_run import LastSteps, RecordedRun, read_run
from scripts.run_processes import STOPPED, NotLive, RunProcesses, find_run, find_servers, is_live, seen_to_write, state

SUPERVISORS = ("health_monitor", "coordinator")
SHARE_OF_DEADLINE = 0.8
"""Of the check's, for one wait: the rest is for what comes after the answer."""
LAST_STEPS = 10
RESULTS = {Health.HEALTHY: OK, Health.SUSPECT: BAD, Health.DEAD: BAD, Health.UNKNOWN: UNKNOWN}
ZERO_LIMITS = {"zero_alert_steps": int | None, "zero_breaker_steps": int | None, "baseline_steps": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked. `is_live` None: the driver is on another machine and was not seen to write. `now`: what it was
    seen to write. `processes`: of a live run, as far as they are here. `areal`: of a run of AReaL's."""

    paths: RunPaths
    view: RecordedRun
    steps: LastSteps
    is_live: bool | None
    processes: RunProcesses | None
    timeout_s: float
    recent_s: float
    extra_servers: tuple[str, ...]
    now: CurrentStatus | None = None
    areal: ArealRun | None = None

    @property
    def may_be_live(self) -> bool:
        return self.is_live is not False

    @property
    def health(self) -> RunHealth | None:
        """As the run judges itself now."""
        return None if self.now is None else self.now.health

    @property
    def has_own_servers(self) -> bool:
        """Another project's trainer has servers that the run does not watch: its logs alone tell of them."""
        return self.health is None and bool(foreign_trainer(self.view.settings))


def find_subject(paths: RunPaths, *, timeout_s: float, recent_s: float, extra_servers: tuple[str, ...] = ()) -> Subject:
    """A run of ours, by its journal and its processes; or one of AReaL's, by its logs and its processes."""
    processes: RunProcesses | None = None
    areal: ArealRun | None = None
    now: CurrentStatus | None = None
    if is_areals(paths):
        areal = read_areal(trial_of_logs(paths))
        live = live_of(areal)
        view, steps = areal_view(areal, live), areal.steps
        extra_servers = extra_servers if live is False else (*read_servers(paths.logs), *extra_servers)
    else:
        if is_live(paths) is not False or (paths.now.exists() and not last_end(paths)):
            now = seen_to_write(paths, SHARE_OF_DEADLINE * timeout_s)
        # After that wait: it may have ended meanwhile.
        (view, steps), live = read_run(paths), is_live(paths) if now is None else True
        with contextlib.suppress(NotLive):  # it has ended just now
            processes = find_run(paths) if live else None
    return Subject(
        paths=paths,
        view=view,
        steps=steps,
        is_live=live,
        processes=processes,
        timeout_s=timeout_s,
        recent_s=recent_s,
        extra_servers=extra_servers,
        now=now,
        areal=areal,
    )


def check_run(subject: Subject) -> list[Finding]:
    view = subject.view
    if subject.areal is not None:
        state, *judged = judge_run(view, subject.steps, is_live=subject.is_live, now=time.time())
        if subject.is_live is None:
            state = dataclasses.replace(state, text=view.state_reason)
        return [state, *judged, judge_processes(subject.areal, is_live=subject.is_live)]
    steps = subject.steps
    if subject.is_live is False and not view.started_at and steps.last_step is None:
        return [Finding("state", f"{subject.paths.logs} has no events.jsonl of a run", UNKNOWN)]
    findings = judge_run(view, steps, is_live=subject.is_live, now=time.time(), health=subject.health)
    is_starting = view.state in ("", "INITIALIZING")
    if subject.may_be_live:
        findings.append(judge_now(subject.now, is_due=subject.is_live is True and not is_starting))
    if subject.processes is not None and foreign_trainer(view.settings):
        findings.append(_command(subject.paths, subject.processes.driver.pid, is_starting=is_starting))
    elif subject.processes is not None:
        findings.append(_processes(subject.processes, is_starting=is_starting))
    elif subject.is_live is False:
        findings.append(_left_over(subject.paths))
    if view.not_read:
        findings.append(Finding("files", f"not read: {'; '.join(view.not_read)}", NOTE))
    return findings


def judge_now(now: CurrentStatus | None, *, is_due: bool) -> Finding:
    """`is_due`: a run is here that should write it."""
    if now is None:
        text = "it was not seen to be written: the Coordinator or the driver hangs, has ended, or is being replaced"
        return Finding("now.json", text, BAD if is_due else UNKNOWN)
    facts = {"attempt": now.attempt, "beat": now.beat, "look_age_s": None if now.health is None else now.health.age_s}
    return Finding("now.json", f"written just now, on {now.host}", OK, facts=facts)


def judge_run(
    view: RecordedRun, steps: LastSteps, *, is_live: bool | None, now: float, health: RunHealth | None = None
) -> list[Finding]:
    """`health`: as the run judges itself now."""
    since_step_s = None if steps.last_at is None else max(now - steps.last_at, 0.0)
    facts = {
        "word": "" if is_live else view.status,  # a live run has begun again, whatever its status was
        "state": view.state,
        "is_live": is_live,
        "last_step": steps.last_step,
        "since_step_s": since_step_s,
        "usual_step_s": steps.usual_step_s,
    }
    level, text = _judge_state(view, steps, is_live)
    findings = [Finding("state", text, level, facts=facts)]
    if is_live and since_step_s is not None and steps.usual_step_s is not None and view.state == "RUNNING":
        is_stalled = since_step_s > max(STALL_STEPS * steps.usual_step_s, STALL_MIN_S)
        text = f"the last step was {since_step_s:.0f} s ago, one usually takes {steps.usual_step_s:.1f} s"
        verdict = BAD if is_stalled else OK
        if steps.last_at is not None and (ahead := steps.last_at - now) > STALL_MIN_S:
            verdict, text = UNKNOWN, f"the last step's time is {ahead:.0f} s ahead of this clock: its age is not known"
        findings.append(Finding("steps", text, verdict, facts=facts))
    if steps.unread:
        findings.append(Finding("steps", steps.unread, UNKNOWN, facts=facts))
    elif view.status == "FINISHED" and not is_live and view.total_steps and _done(steps) < view.total_steps:
        text = f"all {view.total_steps} are done by its journal, but metrics.jsonl ends after {_done(steps)}"
        findings.append(Finding("steps", text, UNKNOWN, facts=facts))
    if health is not None and health.trainer is not None:
        findings.append(_as_judged("trainer", health.trainer))
    rewards = None if health is None else health.rewards
    if rewards is not None and rewards.health is not Health.HEALTHY:
        findings.append(_as_judged("reward", rewards))
    elif steps.rewards:
        last = steps.rewards[-LAST_STEPS:]
        text = f"mean of {mean_of([one.mean for one in last]):.3f} over the last {len(last)} steps"
        wrong = ""
        if rewards is None:  # else the run has judged them itself
            wrong = judge_zeros(steps.rewards, _zero_limits(view), restored_step=view.restored_step).reason
        findings.append(Finding("reward", wrong or text, BAD if wrong else OK, facts=facts))
    return findings


def _as_judged(subject: str, verdict: Verdict) -> Finding:
    facts = {"health": verdict.health, "cause": verdict.cause}
    return Finding(subject, verdict.reason, RESULTS[verdict.health], facts=facts)


def _zero_limits(view: RecordedRun) -> RewardHealthConfig:
    """As the run has them; the defaults where it did not write them down."""
    written = view.settings.get("reward_health")
    known = written if isinstance(written, Mapping) else {}
    limits = RewardHealthConfig()
    for key, kind in ZERO_LIMITS.items():
        if key in known and isinstance(known[key], kind):
            setattr(limits, key, known[key])
    return limits


def _done(steps: LastSteps) -> int:
    return 0 if steps.last_step is None else steps.last_step + 1


def _judge_state(view: RecordedRun, steps: LastSteps, is_live: bool | None) -> tuple[Severity, str]:
    if view.status and not is_live:
        return OK if view.status == "FINISHED" else BAD, f"{view.status}: {view.reason}"
    if is_live is False:
        return BAD, GONE
    if is_live is None:
        return UNKNOWN, f"{view.state} by its journal; its driver is on another machine, or in another container"
    if view.incidents:
        return BAD, f"{view.state}: {'; '.join(view.incidents.values())}"
    waits = [reason for since, reason in view.waits.values() if steps.last_at is None or since > steps.last_at]
    if waits and view.state in ("", "INITIALIZING", "RUNNING"):
        return BAD, f"{view.state}: {'; '.join(waits)}"
    if view.state == "RUNNING":
        total = f" of {view.total_steps}" if view.total_steps else ""
        return OK, "RUNNING" if steps.unread else f"RUNNING, {_done(steps)}{total} steps are done"
    if view.state == "PAUSED" and view.held:
        return NOTE, f"PAUSED as asked: {view.held}"
    if view.state in ("", "INITIALIZING"):
        return UNKNOWN, "it is still starting"
    return BAD, f"{view.state}: {view.state_reason}" if view.state_reason else view.state


def _processes(found: RunProcesses, *, is_starting: bool) -> Finding:
    """Trainer and supervisors, by which a run that does not write is understood; servers have their own check."""
    there = {**found.supervisors, "driver": found.driver}
    if found.trainer is not None:
        there["trainer"] = found.trainer
    pids = {name: process.pid for name, process in there.items()}
    facts = {"pids": pids}
    if missing := [name for name in (*SUPERVISORS, "trainer") if name not in pids]:
        text = f"no process of {', '.join(missing)}"
        return Finding("processes", text, UNKNOWN if is_starting else BAD, facts=facts)
    if stopped := [f"{name} {process.pid}" for name, process in there.items() if state(process) in STOPPED]:
        return Finding("processes", f"stopped: {', '.join(stopped)}", BAD, facts=facts)
    return Finding("processes", ", ".join(f"{name} {pid}" for name, pid in pids.items()), OK, facts=facts)


def _command(paths: RunPaths, driver: int, *, is_starting: bool) -> Finding:
    """Of another project's trainer: its whole tree, which one actor supervises."""
    pids = sorted(process.pid for process in bearing(mark_of(paths)))
    if not pids:
        return Finding("processes", "the command does not run", UNKNOWN if is_starting else BAD, facts={"pids": {}})
    text = f"driver {driver}, the command's {', '.join(map(str, pids))}"
    return Finding("processes", text, OK, facts={"pids": {"driver": driver, "command": pids}})


def _left_over(paths: RunPaths) -> Finding:
    pids = {server.name: [process.pid for process in server.tree] for server in find_servers(paths)}
    if not pids:
        return Finding("processes", "no server of it is left here, as it should be", OK)
    text = f"no driver is here, but these are still running: {', '.join(f'{n} {p}' for n, p in pids.items())}"
    return Finding("processes", text, BAD, facts={"pids": pids})
