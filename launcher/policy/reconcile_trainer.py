"""The trainer's part of a plan: restart it, load or restore a checkpoint, pause it for a broken verifier, undo a
restore that changed nothing."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.base.messages import Cause, Health, Incident
from launcher.policy.actions import (
    ParkTrainer,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    UnparkTrainer,
)
from launcher.policy.checkpoint_status import CheckpointFacts, newest_first
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import AT_ITS_START
from launcher.policy.observed import StandbyTrainer, TrainerFacts
from launcher.policy.plan_builder import KEPT, PlanBuilder
from launcher.policy.restart_budget import Rung
from launcher.policy.restore import choose, first_damaged
from launcher.policy.run_state import RunState

TRAINER = "trainer"
OF_THE_HOST = frozenset({RanOut.SERVER_HOST, RanOut.TRAINER_HOST})
NOT_OF_THE_TRAINER = frozenset({Rung.RETRY, Rung.SERVER})


def holds_damage(incident: Incident | None, trainer: TrainerFacts) -> bool:
    """Are the trainer's weights from after the damage began? After a restore to before it, no longer."""
    damaged = first_damaged(incident) if incident is not None else None
    return damaged is not None and trainer.is_loaded and trainer.next_step - 1 >= damaged


def reconcile_trainer(builder: PlanBuilder) -> None:
    """Orders what the trainer needs first, if anything."""
    seen, trainer = builder.seen, builder.seen.trainer
    if builder.does(RestartTrainer) or builder.does(RestoreTrainer):
        return
    if trainer.verdict.health is Health.DEAD and trainer.unschedulable_since is not None:
        end = f"{trainer.verdict.reason}; Ray has found no node for the trainer"
        builder.wait_for_node("the trainer", trainer.unschedulable_since, end)
    elif trainer.verdict.health is Health.DEAD:
        _restart(builder)
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


def _restart(builder: PlanBuilder) -> None:
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
        restore(builder, incident)
        return
    checkpoints = builder.checkpoints()
    if checkpoints is None:
        return
    repair = builder.next_repair(Cause.CHECKPOINT_CORRUPT, TRAINER, progress_at=builder.seen.progress_at)
    choice = choose(checkpoints, None, builder.history, builder.config.restore)
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
        restore(builder, incident)


def _restore_as_asked(builder: PlanBuilder, asked: RestoreTrainer) -> None:
    """A person chose, so the damage that is known, and what restores from it have cost, decide nothing here."""
    if not builder.seen.trainer.is_paused:
        builder.order(PauseTrainer(reason=asked.reason, save=True))  # saved, for another restore is the way back
    elif not builder.rests(RestoreTrainer):
        builder.order(asked)


def restore(builder: PlanBuilder, incident: Incident) -> None:
    """Go back to before `incident`, and condemn what came after. Halts where that can't help."""
    checkpoints = None if builder.rests(RestoreTrainer) else builder.checkpoints()
    if checkpoints is None:
        return
    choice = choose(checkpoints, incident, builder.history, builder.config.restore)
    repair = builder.next_repair(
        incident.cause, TRAINER, progress_at=builder.seen.progress_at, without=NOT_OF_THE_TRAINER
    )
    if choice.global_step is None or repair.rung is Rung.HALT:
        builder.halt("; ".join([incident.reason, choice.reason if choice.global_step is None else repair.reason]))
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
    if damaged is None or all(checkpoint.global_step < damaged for checkpoint in newest_first(checkpoints)):
        return None
    return damaged - 1


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
    advice = (
        f"{incident.reason}. Look at the reward function (what it answers to new completions), the prompts, the chat "
        "template and the servers"
    )
    if any(one.cause is Cause.REWARD_COLLAPSE and one.restored_step == at for one in builder.history):
        builder.reinstate_after = at  # whether that succeeded is added to the reason when it is known
    else:
        advice += "; no checkpoint stays condemned for it, and the same command resumes from the newest"
    builder.halt(advice)
