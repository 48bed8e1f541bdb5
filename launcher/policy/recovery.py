"""What to do now: (what is observed, history, now) → ordered actions, next state, reason.

    trainer   dead ─► restart ─► load a checkpoint ─► (paused) ─┐
              damaged ─► pause ─► restore (and condemn) ────────┤
              a person asks ─► pause ─► restore ────────────────┤
              verifier broken ─► pause, wait, at last halt      │
              not the weights ─► pause, halt (undoes a restore) │
    servers   dead ─► restart ─► STALE ─► load weights ─► admit ┴─► resume, when one is READY with the right weights
    disk      full, read-only, stalled ─► pause, repair nothing, wait
    fleet     missing ─► start ─► as a dead one; too many ─► leaves, when another one serves

Each plan holds only what can be done from here; what follows from its success is in the next plan, made from the
next look. So the same look gives the same plan, an action that failed is simply due again (its budget in
launcher/policy/restart_budget.py), and faults during a repair need no cases of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.base.messages import Cause, Health, ServerState, TerminalStatus
from launcher.config.schema import RunConfig
from launcher.policy.actions import (
    Halt,
    PauseTrainer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.disk_health import DiskTrouble
from launcher.policy.observed import Observed, RecoveryPlan
from launcher.policy.plan_builder import PlanBuilder
from launcher.policy.reconcile_fleet import reconcile_fleet
from launcher.policy.reconcile_servers import is_current, is_dead, is_unschedulable, reconcile_servers
from launcher.policy.reconcile_trainer import holds_damage, reconcile_standby_trainer, reconcile_trainer
from launcher.policy.restart_budget import RepairAttempt
from launcher.policy.run_state import ENDS, RunState, transition

UNJUDGED = "the HealthMonitor is asked first whether anything is wrong"
NO_STEP_DURING = frozenset({Cause.VERIFIER_BROKEN, Cause.OUTSIDE_WEIGHTS})


def plan(seen: Observed, history: Sequence[RepairAttempt], config: RunConfig, now: float) -> RecoveryPlan:
    """The plan for one look. `history`: attempts so far, oldest first, on the same clock as `now`."""
    if seen.state in ENDS:
        return RecoveryPlan(actions=(), state=seen.state, reason="the run has ended")
    if seen.state is RunState.SHUTTING_DOWN or seen.ending is not None:
        return _shut_down(seen)
    if seen.abort_reason or seen.trainer.is_finished:
        status = TerminalStatus.FINISHED if seen.trainer.is_finished else TerminalStatus.ABORTED
        reason = "all steps are done" if seen.trainer.is_finished else seen.abort_reason
        return _end(seen, Halt(reason=reason, word=status))
    if seen.disk is not None:
        return _wait_for_disk(seen, seen.disk, config, now)
    if seen.monitor_silent_s > config.health.monitor_silence_s:
        # No step is taken without its answer, and Ray has restarted it each time: this would never end.
        silent = f"the HealthMonitor has answered nobody for {seen.monitor_silent_s:.0f} s"
        reason = f"{silent}, more than health.monitor_silence_s; see ray.log in the run's logs"
        return _end(seen, Halt(reason=reason, may_pass=True))
    builder = PlanBuilder(seen=seen, history=history, config=config, now=now)
    reconcile_trainer(builder)
    reconcile_servers(builder)
    reconcile_fleet(builder)
    _hold_or_resume(builder)
    reconcile_standby_trainer(builder)
    if builder.halt_reason:
        halt = Halt(reason=builder.halt_reason, may_pass=builder.may_pass, reinstate_after=builder.reinstate_after)
        return _end(seen, halt)
    state = transition(seen.state, _next_state(builder))
    runs_now = _what_runs(seen) if state is RunState.RUNNING and seen.state is not RunState.RUNNING else ""
    waits = "; ".join(builder.reasons) or seen.hold_reason or _unready(seen) or _known(seen)
    return RecoveryPlan(
        actions=tuple(builder.actions),
        state=state,
        reason=runs_now or waits or "nothing to do",
        attempts=tuple(builder.attempts),
        wake_at=min(builder.wake_at, default=None),
        needs_checkpoints=builder.needs_checkpoints,
    )


def _what_runs(seen: Observed) -> str:
    """Of a run that has just begun to run, or runs again."""
    serving = [one.name for one in seen.servers if one.state is ServerState.READY]
    others = [f"{one.name} is {one.state}" for one in seen.servers if one.state is not ServerState.READY]
    served_by = f"{', '.join(serving)} {'serves' if len(serving) == 1 else 'serve'}"
    return "; ".join([f"the trainer takes step {seen.trainer.next_step}", served_by, *others])


def _unready(seen: Observed) -> str:
    return "; ".join(f"{one.name} is {one.state}" for one in seen.servers if one.state is not ServerState.READY)


def _known(seen: Observed) -> str:
    return "" if seen.incident is None else seen.incident.reason.partition("\n")[0]


def _end(seen: Observed, halt: Halt) -> RecoveryPlan:
    state = transition(seen.state, RunState.SHUTTING_DOWN)
    return RecoveryPlan(actions=(halt,), state=state, reason=f"{halt.word}: {halt.reason}")


def _wait_for_disk(seen: Observed, disk: DiskTrouble, config: RunConfig, now: float) -> RecoveryPlan:
    """Nothing is repaired: each repair would meet the same disk. The trainer pauses, and a person makes room."""
    give_up_at = disk.first + config.disk.patience_s
    if now >= give_up_at:
        return _end(seen, Halt(reason=f"{disk.reason}, for more than disk.patience_s={config.disk.patience_s:g}"))
    builder = PlanBuilder(seen=seen, history=(), config=config, now=now, wake_at=[give_up_at])
    trainer = seen.trainer
    if trainer.verdict.health is not Health.DEAD and trainer.is_loaded and not trainer.is_paused:
        builder.order(PauseTrainer(reason=disk.reason))
    is_starting = seen.state is RunState.INITIALIZING
    return RecoveryPlan(
        actions=tuple(builder.actions),
        state=seen.state if is_starting else transition(seen.state, RunState.PAUSED),
        reason=f"the run waits for its disk: {disk.reason}",
        wake_at=min(builder.wake_at),
    )


def _shut_down(seen: Observed) -> RecoveryPlan:
    """Continue it, also where the Coordinator that began it was killed; the status that it chose stays."""
    status = seen.ending or TerminalStatus.ERRORED
    if seen.is_stopped:
        shutting_down = transition(seen.state, RunState.SHUTTING_DOWN)
        return RecoveryPlan(
            actions=(), state=transition(shutting_down, RunState(status)), reason="everything has stopped"
        )
    halt = Halt(reason="the run was being shut down", word=status, reinstate_after=seen.reinstate_after)
    under_way = any(isinstance(action, Halt) for action in seen.under_way)
    return RecoveryPlan(actions=() if under_way else (halt,), state=RunState.SHUTTING_DOWN, reason=halt.reason)


def _hold_or_resume(builder: PlanBuilder) -> None:
    trainer, hold = builder.seen.trainer, builder.seen.hold_reason
    if trainer.verdict.health is Health.DEAD or not trainer.is_loaded or _is_restoring(builder):
        return
    if hold and not trainer.is_paused:
        builder.order(PauseTrainer(reason=hold))
    if trainer.is_paused and not _why_paused(builder) and _can_serve(builder):
        if builder.seen.is_judged:
            builder.order(ResumeTrainer(), reason="the trainer can resume")
        else:
            builder.reasons.append(UNJUDGED)


def _why_paused(builder: PlanBuilder) -> str:
    """Why the trainer must not step now, beyond the want of a server; "" if it may."""
    incident = builder.seen.incident
    if builder.seen.hold_reason:
        return builder.seen.hold_reason
    if builder.seen.asked_restore is not None:
        return builder.seen.asked_restore.reason
    if incident is not None and (incident.cause in NO_STEP_DURING or holds_damage(incident, builder.seen.trainer)):
        return incident.reason
    return ""


def _can_serve(builder: PlanBuilder) -> bool:
    return any(
        server.state is ServerState.READY and not is_dead(server) and is_current(server, builder.seen.trainer)
        for server in builder.seen.servers
    )


def _is_restoring(builder: PlanBuilder) -> bool:
    return builder.does(RestartTrainer) or builder.does(RestoreTrainer)


def _next_state(builder: PlanBuilder) -> RunState:
    """The state that shows what is being done; until the trainer steps, or is held where it could, INITIALIZING."""
    seen, trainer = builder.seen, builder.seen.trainer
    steps = trainer.is_loaded and not trainer.is_paused and trainer.verdict.health is not Health.DEAD
    if seen.state is RunState.INITIALIZING and not (steps and _can_serve(builder)):
        is_held = trainer.is_loaded and trainer.is_paused and bool(seen.hold_reason) and _can_serve(builder)
        return RunState.PAUSED if is_held and trainer.verdict.health is not Health.DEAD else RunState.INITIALIZING
    if _is_restoring(builder) or trainer.verdict.health is Health.DEAD or not trainer.is_loaded:
        state = RunState.RESTORING
    elif _why_paused(builder):
        state = RunState.PAUSED
    elif _is_repairing(builder):
        state = RunState.REPAIRING
    elif trainer.is_paused:
        state = seen.state if seen.state is not RunState.RUNNING else RunState.PAUSED
    else:
        state = RunState.RUNNING
    # A first fault before the first step is met while everything starts anyway.
    return RunState.INITIALIZING if seen.state is RunState.INITIALIZING and state is not RunState.RUNNING else state


def _is_repairing(builder: PlanBuilder) -> bool:
    settled = {ServerState.READY, ServerState.SUSPECT, ServerState.STOPPED, ServerState.FAILED}
    return any(
        server.state not in settled or (is_dead(server) and server.state is not ServerState.FAILED)
        for server in builder.seen.servers
        if not is_unschedulable(server)
    )
