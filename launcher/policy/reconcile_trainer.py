"""The trainer's part of a plan: restart it, load or restore a checkpoint, pause it for a broken verifier, undo a
restore that changed nothing."""

from __future__ import annotations

from launcher.base.messages import Cause, Health, Incident
from launcher.policy.actions import (
    CondemnCheckpoints,
    ParkTrainer,
    PauseTrainer,
    ReinstateCheckpoints,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    UnparkTrainer,
)
from launcher.policy.checkpoint_status import newest_first
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
    repair = builder.next_repair(Cause.CHECKPOINT_CORRUPT, TRAINER, progress_at=builder.seen.progress_at)
    choice = choose(builder.seen.checkpoints, None, builder.history, builder.config.restore)
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


def restore(builder: PlanBuilder, incident: Incident) -> None:
    """Go back to before `incident`, and condemn what came after. Halts where that can't help."""
    if builder.rests(RestoreTrainer):
        return
    choice = choose(builder.seen.checkpoints, incident, builder.history, builder.config.restore)
    repair = builder.next_repair(
        incident.cause, TRAINER, progress_at=builder.seen.progress_at, without=NOT_OF_THE_TRAINER
    )
    if choice.global_step is None or repair.rung is Rung.HALT:
        builder.halt("; ".join([incident.reason, choice.reason if choice.global_step is None else repair.reason]))
    elif builder.is_due(repair):
        _condemn(builder, incident)
        builder.order(
            RestoreTrainer(
                global_step=choice.global_step,
                reason=f"{incident.reason}; {choice.reason}",
                onset_step=incident.onset_step,
            ),
            attempt=builder.attempt(
                incident.cause, TRAINER, Rung.RESTORE, onset_step=incident.onset_step, restored_step=choice.global_step
            ),
        )


def _condemn(builder: PlanBuilder, incident: Incident) -> None:
    damaged = first_damaged(incident)
    if damaged is None:
        return
    if any(checkpoint.global_step >= damaged for checkpoint in newest_first(builder.seen.checkpoints)):
        builder.order(CondemnCheckpoints(after_step=damaged - 1, reason=incident.reason))


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
    """The weights were not what changed (P12). Nobody mends data, template or servers while the run waits: what was set
    aside is put back, and the next command resumes from it."""
    trainer, cause = builder.seen.trainer, Cause.OUTSIDE_WEIGHTS
    at = trainer.next_step - 1
    was_restored = any(one.cause is Cause.REWARD_COLLAPSE and one.restored_step == at for one in builder.history)
    is_back = any(one.global_step > at for one in newest_first(builder.seen.checkpoints))
    repair = builder.next_repair(cause, TRAINER, progress_at=builder.seen.progress_at)
    if not trainer.is_paused:
        builder.order(PauseTrainer(reason=incident.reason))
    elif not was_restored or is_back or repair.rung is Rung.HALT:
        left = "no checkpoint stays condemned for it, and the same command resumes from the newest"
        if is_back:  # what the restore before the last condemned is of another branch, and stays aside
            left = "what the last restore set aside is back, and the same command resumes from the newest"
        elif was_restored:
            left = f"what was set aside after step {at} could not be put back; the same command resumes from step {at}"
        builder.halt(
            f"{incident.reason}. Look at the reward function (what it answers to new completions), the prompts, the "
            f"chat template and the servers; {left}"
        )
    elif builder.is_due(repair):
        builder.order(
            ReinstateCheckpoints(after_step=at, reason=incident.reason),
            attempt=builder.attempt(cause, TRAINER, Rung.RETRY),
        )
