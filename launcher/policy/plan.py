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

It is longer than other files since what one part orders decides what the others may: a server gets no weights while
the trainer restores, and nothing resumes before both are done. From the top: the plan, the trainer, the standby, the
servers, the fleet, the pause, the state that follows, and the builder that all of them order from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.base.errors import StateError
from launcher.base.messages import Cause, Health, Incident, Overrides, ServerState, TerminalStatus
from launcher.base.wording import in_one_line
from launcher.config.schema import RunConfig
from launcher.config.supervision import RestoreConfig
from launcher.policy.actions import (
    AbandonServer,
    Action,
    AdmitServer,
    Halt,
    LeaveServer,
    LoadWeights,
    ParkTrainer,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
    UnparkTrainer,
)
from launcher.policy.checkpoint_status import CheckpointFacts, newest_first
from launcher.policy.disk_health import DiskTrouble
from launcher.policy.exit_cause import RanOut, least_fraction
from launcher.policy.memory_backoff import AT_ITS_START, next_rung
from launcher.policy.observed import (
    ENDS,
    TRAINER,
    Observed,
    RecoveryPlan,
    RunState,
    ServerFacts,
    StandbyTrainer,
    can_serve,
    holds_damage,
    is_current,
    is_dead,
    is_doubted,
    is_unschedulable,
)
from launcher.policy.restart_budget import Repair, RepairAttempt, Rung, next_repair
from launcher.policy.restore import HINT, choose, first_damaged, for_reports
from launcher.policy.standstill import longest_standstill_s

UNJUDGED = "the HealthMonitor is asked first whether anything is wrong"
WAITS_ITSELF = "the trainer waits between two steps, and says itself when it goes on"
NO_STEP_DURING = frozenset({Cause.VERIFIER_BROKEN, Cause.OUTSIDE_WEIGHTS})
NO_OVERRIDES: Overrides = {}
KEPT = "and nothing may give way (memory.give_way=false)"
OF_THE_HOST = frozenset({RanOut.SERVER_HOST, RanOut.TRAINER_HOST})
NOT_OF_THE_TRAINER = frozenset({Rung.RETRY, Rung.SERVER})
NOT_OF_A_SERVER = frozenset({Rung.RESTORE})
"""What no weights cause must throw no step away (P12), and what they do is another attempt's: it loads a checkpoint."""
UNDECIDED = (LoadWeights, AdmitServer)
LONGEST_ERROR = 300
"""Characters, in a reason: an actor may have failed with a whole log."""
STARTED = frozenset({ServerState.STALE, ServerState.READY})

CHANGING = frozenset({RunState.RUNNING, RunState.PAUSED, RunState.REPAIRING, RunState.RESTORING})

TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.INITIALIZING: frozenset({RunState.RUNNING, RunState.PAUSED, RunState.SHUTTING_DOWN}),
    **{state: CHANGING - {state} | {RunState.SHUTTING_DOWN} for state in CHANGING},
    RunState.SHUTTING_DOWN: ENDS,
    **{state: frozenset() for state in ENDS},
}
"""From each state to which. To stay is always legal, and no transition."""


def plan(seen: Observed, history: Sequence[RepairAttempt], config: RunConfig, now: float) -> RecoveryPlan:
    """The plan for one look. `history`: attempts so far, oldest first, on the same clock as `now`."""
    if seen.state in ENDS:
        return RecoveryPlan(actions=(), state=seen.state, reason="the run has ended")
    if seen.state is RunState.SHUTTING_DOWN or seen.ending is not None:
        return _shut_down(seen)
    if seen.abort_reason or seen.trainer.is_finished:
        status = TerminalStatus.FINISHED if seen.trainer.is_finished else TerminalStatus.ABORTED
        reason = seen.trainer.told or "all steps are done" if seen.trainer.is_finished else seen.abort_reason
        return _end(seen, Halt(reason=reason, word=status))
    if seen.disk is not None:
        return _wait_for_disk(seen, seen.disk, config, now)
    if seen.monitor_silent_s > config.health.monitor_silence_s:
        # No step is taken without its answer, and Ray has restarted it each time: this would never end.
        return _end(seen, _halt_for_silence("HealthMonitor", seen.monitor_silent_s, seen.monitor_error))
    if seen.door_silent_s > config.health.monitor_silence_s:
        # The command's requests wait for it however long it takes, and meanwhile no server is repaired.
        return _end(seen, _halt_for_silence("door of the trainer's servers", seen.door_silent_s, seen.door_error))
    if seen.standstill_s > (limit_s := longest_standstill_s(config)):
        return _end(seen, _halt_for_standstill(seen, limit_s))
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


def _halt_for_silence(who: str, silent_s: float, error: str) -> Halt:
    reason = (
        f"the Coordinator's questions to the {who} have had no usable answer for {silent_s:.0f} s, more than "
        f"health.monitor_silence_s; the last: {in_one_line(error, longest=LONGEST_ERROR)}"
    )
    return Halt(reason=f"{reason}; see ray.log in the run's logs", may_pass=True)


def _halt_for_standstill(seen: Observed, limit_s: float) -> Halt:
    orders = [*seen.not_before, *((type(action), getattr(action, "name", "")) for action in seen.under_way)]
    names = sorted({order_text(kind, name) for kind, name in orders})
    reason = (
        f"the run could take no step for {seen.standstill_s:.0f} s, more than {limit_s:.0f} s, in which all could have "
        "been started twice (rollout.setup_timeout, health.trainer_first_s), and it waits for nobody"
    )
    tried = f"; failed, or not done by then: {', '.join(names)}" if names else ""
    return Halt(reason=f"{reason}{tried}", may_pass=True)


def order_text(kind: type[Action], name: str) -> str:
    """An order as reasons name it; `name`: of its server, "" where it is for none."""
    return f"{kind.__name__} {name}".strip()


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


def _what_runs(seen: Observed) -> str:
    """Of a run that has just begun to run, or runs again."""
    serving = [one.name for one in seen.servers if one.state is ServerState.READY]
    others = [f"{one.name} is {one.state}" for one in seen.servers if one.state is not ServerState.READY]
    served_by = [f"{', '.join(serving)} {'serves' if len(serving) == 1 else 'serve'}"] if serving else []
    return "; ".join([f"the trainer takes step {seen.trainer.next_step}", *served_by, *others])


def _unready(seen: Observed) -> str:
    return "; ".join(f"{one.name} is {one.state}" for one in seen.servers if one.state is not ServerState.READY)


def _known(seen: Observed) -> str:
    return "" if seen.incident is None else seen.incident.reason.partition("\n")[0]


# ── the trainer ──


def reconcile_trainer(builder: PlanBuilder) -> None:
    """Orders what the trainer needs first, if anything."""
    seen, trainer = builder.seen, builder.seen.trainer
    if builder.does(RestartTrainer) or builder.does(RestoreTrainer):
        return
    if trainer.verdict.health is Health.DEAD and trainer.unschedulable_since is not None:
        end = f"{trainer.verdict.reason}; Ray has found no node for the trainer"
        builder.wait_for_node("the trainer", trainer.unschedulable_since, end)
    elif trainer.verdict.health is Health.DEAD:
        _restart_trainer(builder)
    elif not trainer.is_loaded:
        _load(builder)
    elif seen.asked_restore is not None:
        _restore_as_asked(builder, seen.asked_restore)
    elif holds_damage(seen.incident, trainer):
        _pause_then_restore(builder)
    elif seen.incident is not None and seen.incident.cause is Cause.VERIFIER_BROKEN:
        _wait_for_the_verifier(builder, seen.incident)
    elif seen.incident is not None and seen.incident.cause is Cause.OUTSIDE_WEIGHTS:
        _undo_restore(builder, seen.incident)


def _restart_trainer(builder: PlanBuilder) -> None:
    trainer = builder.seen.trainer
    cause = trainer.verdict.cause or Cause.TRAINER_CRASH
    if builder.rests(RestartTrainer):
        return
    if builder.must_keep_its_settings(trainer.ran_out):
        builder.halt(f"{cause} ({trainer.ran_out}), {KEPT}; {trainer.verdict.reason}")
        return
    overrides, rung_reason = builder.give_way(trainer.ran_out, trainer.verdict.reason)
    repair = builder.next_repair(
        cause, TRAINER, progress_at=builder.seen.progress_at, without=NOT_OF_THE_TRAINER, told=trainer.told
    )
    # Each rung of the memory ladder is another repair, and the ladder ends: the budget is for the same one again.
    if repair.rung is Rung.HALT and not overrides:
        reason = "; ".join(filter(None, [repair.reason, trainer.verdict.reason, rung_reason]))
        builder.halt(reason, may_pass=repair.may_pass and trainer.ran_out is None)
    elif overrides or builder.is_due(repair):
        reason = "; ".join(filter(None, [trainer.verdict.reason, rung_reason or repair.reason]))
        attempt = builder.attempt(cause, TRAINER, Rung.RESTORE, told=trainer.told)
        builder.order(RestartTrainer(reason=reason, overrides=overrides), attempt=attempt)
        if AT_ITS_START & overrides.keys():  # a server holds what it took until it is started again
            for server in builder.seen.servers:
                builder.order(RestartServer(name=server.name, reason=f"it makes room for the trainer: {rung_reason}"))


def _load(builder: PlanBuilder) -> None:
    """A fresh trainer: the newest checkpoint, or where there is damage the one from before it."""
    incident = builder.seen.incident
    if builder.seen.trainer.verdict.health is not Health.HEALTHY or builder.rests(RestoreTrainer):
        return
    if incident is None and not builder.seen.is_judged:
        return  # there may be damage, and the newest checkpoint hold it
    if incident is not None and first_damaged(incident) is not None:
        _restore(builder, incident)
        return
    checkpoints = builder.checkpoints()
    if checkpoints is None:
        return
    repair = builder.next_repair(Cause.CHECKPOINT_CORRUPT, TRAINER, progress_at=builder.seen.progress_at)
    choice = choose(checkpoints, None, builder.history, builder.restore_settings)
    if repair.rung is Rung.HALT or choice.global_step is None:
        reason = f"the trainer's state could not be loaded ({repair.tried}); {choice.reason}"
        builder.halt(reason, may_pass=repair.may_pass)
    elif not builder.is_due(repair):
        return
    elif repair.rung is Rung.RETRY:
        attempt = None  # each trainer that starts loads its state: only one that failed before is a repair
        if builder.has_failed(RestoreTrainer):
            attempt = builder.attempt(Cause.CHECKPOINT_CORRUPT, TRAINER, Rung.RETRY, restored_step=choice.global_step)
        builder.order(RestoreTrainer(global_step=choice.global_step, reason=choice.reason), attempt=attempt)
    else:
        attempt = builder.attempt(Cause.CHECKPOINT_CORRUPT, TRAINER, Rung.RESTORE)
        builder.order(RestartTrainer(reason="its state could not be loaded"), attempt=attempt)


def _pause_then_restore(builder: PlanBuilder) -> None:
    incident = builder.seen.incident
    if incident is None:
        return
    if not builder.seen.trainer.is_paused:
        builder.order(PauseTrainer(reason=incident.reason, save=incident.cause is Cause.REWARD_COLLAPSE))
    else:
        _restore(builder, incident)


def _restore(builder: PlanBuilder, incident: Incident) -> None:
    """Go back to before `incident`, and condemn what came after. Halts where that can't help."""
    checkpoints = None if builder.rests(RestoreTrainer) else builder.checkpoints()
    if checkpoints is None:
        return
    choice = choose(checkpoints, incident, builder.history, builder.restore_settings)
    repair = builder.next_repair(
        incident.cause, TRAINER, progress_at=builder.seen.progress_at, without=NOT_OF_THE_TRAINER
    )
    if choice.global_step is None or repair.rung is Rung.HALT:
        why = choice.reason if choice.global_step is None else repair.reason
        if builder.seen.trainer.is_command and choice.global_step is None:  # the hint's tool knows only our checkpoints
            why = f"{why.partition(HINT)[0]}; choose one by hand, and leave no later one"
        builder.halt("; ".join([incident.reason, why]))
    elif builder.is_due(repair):
        builder.order(
            RestoreTrainer(
                global_step=choice.global_step,
                reason=f"{incident.reason}; {choice.reason}",
                onset_step=incident.onset_step,
                condemn_after=_condemn_after(checkpoints, incident),
            ),
            attempt=builder.attempt(
                incident.cause, TRAINER, Rung.RESTORE, onset_step=incident.onset_step, restored_step=choice.global_step
            ),
        )


def _condemn_after(checkpoints: Sequence[CheckpointFacts], incident: Incident) -> int | None:
    """None where no checkpoint holds the damage."""
    damaged = first_damaged(incident)
    assert damaged is not None, "else nothing is restored for it"
    if all(checkpoint.global_step < damaged for checkpoint in newest_first(checkpoints)):
        return None
    return damaged - 1


def _restore_as_asked(builder: PlanBuilder, asked: RestoreTrainer) -> None:
    """A person chose, so the damage that is known, and what restores from it have cost, decide nothing here."""
    if not builder.seen.trainer.is_paused:
        builder.order(PauseTrainer(reason=asked.reason, save=True))  # saved, for another restore is the way back
    elif not builder.rests(RestoreTrainer):
        builder.order(asked)


def _wait_for_the_verifier(builder: PlanBuilder, incident: Incident) -> None:
    """No restart repairs a reward function; a person may, while nothing is lost. After the patience the run halts.

    The weights are sound, and saved: a person may take a night, and what is in memory alone goes with the machine.
    """
    give_up_at = incident.since + builder.config.reward_health.verifier_patience_s
    if not builder.seen.trainer.is_paused:
        builder.order(PauseTrainer(reason=incident.reason, save=True))
    elif builder.now >= give_up_at:
        builder.halt(f"the reward function is broken: {incident.reason}")
    else:
        builder.wake_at.append(give_up_at)


def _undo_restore(builder: PlanBuilder, incident: Incident) -> None:
    """The weights were not what changed (P12). Nobody mends data, template or servers while the run waits: the halt
    puts back what was set aside, and the next command resumes from it."""
    trainer = builder.seen.trainer
    if not trainer.is_paused:
        builder.order(PauseTrainer(reason=incident.reason))
        return
    at = trainer.next_step - 1
    if trainer.is_command:
        builder.reinstate_after = at
        builder.halt(
            f"{incident.reason}; repair what changed beside the weights, and start the same command again: it resumes "
            "from the newest checkpoint from before the rewards fell"
        )
        return
    advice = (
        f"{incident.reason}. Look at the reward function (what it answers to new completions), the prompts, the chat "
        "template and the servers"
    )
    if any(one.cause is Cause.REWARD_COLLAPSE and one.restored_step == at for one in builder.history):
        builder.reinstate_after = at  # whether that succeeded is added to the reason when it is known
    else:
        advice += "; no checkpoint stays condemned for it, and the same command resumes from the newest"
    builder.halt(advice)


# ── the process that stands by for it ──


def reconcile_standby_trainer(builder: PlanBuilder) -> None:
    """Park the other process while nothing else is to do: the first time when the trainer has loaded, while servers
    still start. Where the host's memory ran out, it is the first to give way."""
    seen = builder.seen
    if any(builder.does(kind) for kind in (RestartTrainer, ParkTrainer, UnparkTrainer)):
        return  # it may be taking over
    if any(one.ran_out in OF_THE_HOST for one in seen.tried):
        if seen.standby_trainer is StandbyTrainer.PARKED:
            builder.order(UnparkTrainer(reason="the host's memory ran out: no trainer stands by any more"))
        return
    goes_on = seen.state in (RunState.INITIALIZING, RunState.RUNNING) and seen.trainer.is_loaded
    if goes_on and not builder.actions and not builder.halt_reason:
        if seen.standby_trainer is StandbyTrainer.EMPTY:
            builder.order(ParkTrainer(reason="it is to take over when the trainer ends"))
        elif seen.standby_trainer is StandbyTrainer.HUNG:
            builder.order(ParkTrainer(reason="the parked trainer answers nobody: another one is parked"))


# ── the servers ──


def reconcile_servers(builder: PlanBuilder) -> None:
    for server in builder.seen.servers:
        if builder.halt_reason or builder.does(RestartServer, server.name) or server.state is ServerState.STOPPED:
            continue
        if not builder.seen.stays(server.name):
            continue
        if is_unschedulable(server):
            _wait_for_node(builder, server)
        elif is_dead(server):
            _repair_server(builder, server, _cause_of(server))
        elif server.is_loading or any(builder.does(kind, server.name) for kind in UNDECIDED):
            continue  # its outcome is not known: the next rung would be a guess
        elif is_doubted(server):
            _repair_server(builder, server, _cause_of(server))
        elif server.state in STARTED and _weights_can_be_had(builder):
            _bring_up_to_date(builder, server)


def _wait_for_node(builder: PlanBuilder, server: ServerFacts) -> None:
    """The others continue without it; where there is none, the run waits for a node, and halts at last."""
    assert server.unschedulable_since is not None
    if not any(not is_unschedulable(other) and _may_work(builder, other) for other in builder.seen.servers):
        end = f"{server.verdict.reason}; Ray has found no node for any server"
        builder.wait_for_node(server.name, server.unschedulable_since, end)


def _repair_server(builder: PlanBuilder, server: ServerFacts, cause: Cause) -> None:
    """Its own restarts; then the run goes on without it, or where no other may do the work halts."""
    if builder.rests(RestartServer, server.name):
        return  # nothing is counted against a budget for it
    if not is_dead(server) and builder.rests(LoadWeights, server.name):
        return  # of a dead one it failed for its death, which is repaired at once
    is_spared = _another_may_work(builder, server)
    if builder.must_keep_its_settings(server.ran_out):
        reason = f"{cause} of {server.name} ({server.ran_out}), {KEPT}; {server.verdict.reason}"
        _give_up_server(builder, server, reason, is_spared=False, may_pass=False)
        return
    repair = _next_repair(builder, server, cause)
    overrides, rung_reason = builder.give_way(server.ran_out, server.verdict.reason)
    if overrides:
        _restart_server(builder, server, cause, f"{server.verdict.reason}; {rung_reason}", overrides)
    elif repair.rung is Rung.HALT:
        reason, may_pass = f"{repair.reason}; {server.verdict.reason}", repair.may_pass and server.ran_out is None
        _give_up_server(builder, server, reason, is_spared=is_spared, may_pass=may_pass)
    elif not builder.is_due(repair):
        return
    elif repair.rung is Rung.RETRY:
        _load_weights(builder, server, cause)
    else:
        _restart_server(builder, server, cause, f"{server.verdict.reason}; {repair.reason}", NO_OVERRIDES)


def _next_repair(builder: PlanBuilder, server: ServerFacts, cause: Cause) -> Repair:
    return builder.next_repair(cause, server.name, progress_at=server.progress_at, without=NOT_OF_A_SERVER)


def _restart_server(builder: PlanBuilder, server: ServerFacts, cause: Cause, reason: str, overrides: Overrides) -> None:
    builder.order(
        RestartServer(name=server.name, reason=reason, overrides=overrides),
        attempt=builder.attempt(cause, server.name, Rung.SERVER),
    )


def _give_up_server(builder: PlanBuilder, server: ServerFacts, reason: str, *, is_spared: bool, may_pass: bool) -> None:
    """The run continues with the others; while none of them is ready yet, it waits for them."""
    if not is_spared:
        builder.halt(reason, may_pass=may_pass)
    elif server.state is not ServerState.FAILED and any(
        other.name != server.name and other.state is ServerState.READY and _may_work(builder, other)
        for other in builder.seen.servers
    ):
        builder.order(AbandonServer(name=server.name, reason=reason))


def _another_may_work(builder: PlanBuilder, server: ServerFacts) -> bool:
    """Those that live are asked first: for a dead one the history is read."""

    def may_work(*, dead: bool) -> bool:
        others = (other for other in builder.seen.servers if other is not server and is_dead(other) is dead)
        return any(_may_work(builder, other) for other in others)

    return may_work(dead=False) or may_work(dead=True)


def _may_work(builder: PlanBuilder, server: ServerFacts) -> bool:
    """It is alive, is being restarted, or has restarts of its own left."""
    if not builder.seen.stays(server.name):
        return False
    if not is_dead(server) or builder.does(RestartServer, server.name):
        return server.state is not ServerState.STOPPED
    return _next_repair(builder, server, _cause_of(server)).rung is not Rung.HALT


def _cause_of(server: ServerFacts) -> Cause:
    return server.verdict.cause or Cause.SERVER_CRASH


def _weights_can_be_had(builder: PlanBuilder) -> bool:
    """The trainer holds weights that servers should have, and isn't handing them out itself. A command's are kept by
    its door, whatever becomes of the command."""
    trainer = builder.seen.trainer
    if trainer.is_command:
        return not trainer.is_publishing
    return (
        trainer.is_loaded
        and not trainer.is_publishing
        and trainer.verdict.health is not Health.DEAD
        and not holds_damage(builder.seen.incident, trainer)
        and not builder.does(RestoreTrainer)
        and not builder.does(RestartTrainer)
    )


def _bring_up_to_date(builder: PlanBuilder, server: ServerFacts) -> None:
    if not is_current(server, builder.seen.trainer):
        _repair_server(builder, server, Cause.SERVER_STALE)
    elif server.state is not ServerState.READY:
        builder.order(AdmitServer(name=server.name), reason=f"{server.name} holds the current weights")


def _load_weights(builder: PlanBuilder, server: ServerFacts, cause: Cause) -> None:
    if not _weights_can_be_had(builder):
        return
    trainer = builder.seen.trainer
    builder.order(
        LoadWeights(name=server.name, version=trainer.policy_version, lineage=trainer.lineage),
        reason=f"{server.name} gets version {trainer.policy_version}",
        attempt=builder.attempt(cause, server.name, Rung.RETRY),
    )


# ── the fleet ──


def reconcile_fleet(builder: PlanBuilder) -> None:
    """What is missing of the servers that there are to be is started, what is too many leaves: only while another one
    serves, as its requests need a place. From then on it is neither restarted nor sent weights, and no failure of it
    is counted."""
    seen = builder.seen
    there = {server.name for server in seen.servers}
    for name in seen.fleet or ():
        if name not in there:
            builder.order(RestartServer(name=name, reason=f"there are to be {len(seen.fleet or ())} servers"))
    for server in seen.servers:
        if seen.stays(server.name):
            continue
        if is_dead(server) or _another_serves(builder):
            builder.order(LeaveServer(name=server.name, reason=f"there are to be {len(seen.fleet or ())} servers"))
        else:
            builder.reasons.append(f"{server.name} leaves when another one serves")


def _another_serves(builder: PlanBuilder) -> bool:
    seen = builder.seen
    return any(
        server.state is ServerState.READY
        and not is_dead(server)
        and (is_current(server, seen.trainer) or seen.trainer.is_publishing)
        for server in seen.servers
        if seen.stays(server.name)
    )


# ── the pause ──


def _hold_or_resume(builder: PlanBuilder) -> None:
    trainer, hold = builder.seen.trainer, builder.seen.hold_reason
    if trainer.verdict.health is Health.DEAD or not trainer.is_loaded or _is_restoring(builder):
        return
    if hold and not trainer.is_paused:
        builder.order(PauseTrainer(reason=hold))
    if trainer.is_paused and not _why_paused(builder) and can_serve(builder.seen):
        if trainer.waits_itself:  # an order would be done at once and change nothing: the next turn would give it again
            builder.reasons.append(WAITS_ITSELF)
        elif builder.seen.is_judged:
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


def _is_restoring(builder: PlanBuilder) -> bool:
    return builder.does(RestartTrainer) or builder.does(RestoreTrainer)


# ── the state that follows ──


def _next_state(builder: PlanBuilder) -> RunState:
    """The state that shows what is being done; until the trainer steps, or is held where it could, INITIALIZING."""
    seen, trainer = builder.seen, builder.seen.trainer
    steps = trainer.is_loaded and not trainer.is_paused and trainer.verdict.health is not Health.DEAD
    if seen.state is RunState.INITIALIZING and not (steps and can_serve(seen)):
        is_held = trainer.is_loaded and trainer.is_paused and bool(seen.hold_reason) and can_serve(seen)
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


def transition(state: RunState, to: RunState) -> RunState:
    """`to`, where the table has it. Raises StateError."""
    if to is state or to in TRANSITIONS[state]:
        return to
    legal = ", ".join(sorted(TRANSITIONS[state])) or "none, it is an end"
    raise StateError(f"a run that is {state} can't become {to}", f"legal from {state}: {legal}")


# ── the plan in the making ──


@dataclass(slots=True, kw_only=True)
class PlanBuilder:
    """Once `halt_reason` is set, the plan is to halt; `may_pass`, `reinstate_after`: as of the action."""

    seen: Observed
    history: Sequence[RepairAttempt]
    config: RunConfig
    now: float
    actions: list[Action] = field(default_factory=list)
    attempts: list[RepairAttempt] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    wake_at: list[float] = field(default_factory=list)
    halt_reason: str = ""
    may_pass: bool = False
    reinstate_after: int | None = None
    needs_checkpoints: bool = False
    _kinds_by_name: set[tuple[type[Action], str]] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds_by_name = {(type(action), getattr(action, "name", "")) for action in self.seen.under_way}

    def order(self, action: Action, *, reason: str = "", attempt: RepairAttempt | None = None) -> None:
        """Once: neither while the same is under way for the same subject, nor twice in a plan, nor at once after it
        failed."""
        name = getattr(action, "name", "")
        if self.does(type(action), name) or self.rests(type(action), name):
            return
        self.actions.append(action)
        self._kinds_by_name.add((type(action), name))
        self.reasons.append(reason or getattr(action, "reason", ""))
        if attempt is not None:
            self.attempts.append(attempt)

    def does(self, kind: type[Action], name: str = "") -> bool:
        """Is such an action ordered, or under way?"""
        return (kind, name) in self._kinds_by_name

    def has_failed(self, kind: type[Action], name: str = "") -> bool:
        """Such an action failed when it was last done."""
        return (kind, name) in self.seen.not_before

    def rests(self, kind: type[Action], name: str = "") -> bool:
        """Such an action failed a moment ago; the plan asks to be made again when it may be tried again."""
        not_before = self.seen.not_before.get((kind, name), self.now)
        if not_before > self.now:
            self.wake_at.append(not_before)
            self.reasons.append(f"{order_text(kind, name)} failed: again in {not_before - self.now:.1f} s")
        return not_before > self.now

    @property
    def restore_settings(self) -> RestoreConfig:
        return for_reports(self.config.restore, self.seen.report_every)

    def checkpoints(self) -> tuple[CheckpointFacts, ...] | None:
        """None while nobody has read them: the plan then asks for them, and nothing that needs them is ordered."""
        if self.seen.checkpoints is None:
            self.needs_checkpoints = True
            self.reasons.append("the checkpoints must be read first")
        return self.seen.checkpoints

    def halt(self, reason: str, *, may_pass: bool = False) -> None:
        """The run can't be repaired: what comes later in the plan is not looked at any more."""
        self.may_pass = may_pass
        self.halt_reason = reason

    def is_due(self, repair: Repair) -> bool:
        """May it begin? If not yet, the plan asks to be made again at its time."""
        if repair.not_before > self.now:
            self.wake_at.append(repair.not_before)
            self.reasons.append(f"{repair.reason}, in {repair.not_before - self.now:.1f} s")
            return False
        return True

    def wait_for_node(self, name: str, since: float, end: str) -> None:
        """`name` ended with its node, and Ray has found no other for it `since`: no restart brings any. `end`: its
        reason to halt, once cluster.node_wait_s is over."""
        give_up_at = since + self.config.cluster.node_wait_s
        if self.now < give_up_at:
            self.reasons.append(f"{name} waits for a node, up to cluster.node_wait_s")
            self.wake_at.append(give_up_at)
        else:
            self.halt(f"{end} for {self.now - since:.0f} s (cluster.node_wait_s)")

    def next_repair(
        self,
        cause: Cause,
        subject: str,
        *,
        progress_at: float | None,
        without: frozenset[Rung] = frozenset(),
        told: str = "",
    ) -> Repair:
        return next_repair(
            cause,
            subject,
            self.history,
            self.config.restart,
            now=self.now,
            progress_at=progress_at,
            without=without,
            told=told,
        )

    def must_keep_its_settings(self, ran_out: RanOut | None) -> bool:
        """Memory ran out, and nothing may give way: another try under the same settings would end alike."""
        return ran_out is not None and not self.config.memory.give_way

    def give_way(self, ran_out: RanOut | None, said: str = "") -> tuple[Overrides, str]:
        """The next rung of the memory ladder, and why; none where memory did not run out, or no rung is left.

        `said`: how the process ended, in which SGLang may name what it needs.
        """
        if ran_out is None:
            return NO_OVERRIDES, ""
        rung = next_rung(ran_out, self.seen.memory, self.seen.tried, self.config.memory, least_fraction(said))
        return rung.overrides, rung.reason

    def attempt(
        self,
        cause: Cause,
        subject: str,
        rung: Rung,
        *,
        onset_step: int | None = None,
        restored_step: int | None = None,
        told: str = "",
    ) -> RepairAttempt:
        return RepairAttempt(
            at=self.now,
            cause=cause,
            subject=subject,
            rung=rung,
            onset_step=onset_step,
            restored_step=restored_step,
            told=told,
        )
