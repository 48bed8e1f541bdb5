"""The trainer's part of a plan: restart it, load or restore a checkpoint, pause it for a broken verifier."""

from __future__ import annotations

from launcher.base.messages import Cause, Health, Incident
from launcher.policy.actions import CondemnCheckpoints, PauseTrainer, RestartServer, RestartTrainer, RestoreTrainer
from launcher.policy.checkpoint_status import newest_first
from launcher.policy.memory_backoff import AT_ITS_START
from launcher.policy.observed import TrainerFacts
from launcher.policy.plan_builder import KEPT, PlanBuilder
from launcher.policy.restart_budget import Rung
from launcher.policy.restore import choose, first_damaged

TRAINER = "trainer"
NOT_OF_THE_TRAINER = frozenset({Rung.RETRY, Rung.SERVER, Rung.FLEET})


def damage_stands(incident: Incident | None, trainer: TrainerFacts) -> bool:
    """Are the trainer's weights from after the damage began? After a restore to before it, no longer."""
    damaged = first_damaged(incident) if incident is not None else None
    return damaged is not None and trainer.is_loaded and trainer.next_step - 1 >= damaged


def mend_trainer(draft: PlanBuilder) -> None:
    """Orders what the trainer needs first, if anything."""
    seen, trainer = draft.seen, draft.seen.trainer
    if draft.does(RestartTrainer) or draft.does(RestoreTrainer):
        return
    if trainer.verdict.health is Health.DEAD and trainer.homeless_since is not None:
        _wait_for_a_node(draft, trainer.homeless_since)
    elif trainer.verdict.health is Health.DEAD:
        _restart(draft)
    elif not trainer.is_loaded:
        _load(draft)
    elif damage_stands(seen.incident, trainer):
        _pause_then_restore(draft)
    elif seen.incident is not None and seen.incident.cause is Cause.VERIFIER_BROKEN:
        _wait_for_the_verifier(draft, seen.incident)


def _wait_for_a_node(draft: PlanBuilder, since: float) -> None:
    """It ended with its node, and no other has room for it: no restart makes any."""
    give_up_at = since + draft.config.cluster.node_wait_s
    if draft.now < give_up_at:
        draft.reasons.append("the trainer waits for a node with room for it")
        draft.wake_at.append(give_up_at)
    else:
        waited = f"for {draft.now - since:.0f} s (cluster.node_wait_s)"
        draft.halt(f"{draft.seen.trainer.verdict.reason}; no node has had room for the trainer {waited}")


def _restart(draft: PlanBuilder) -> None:
    trainer = draft.seen.trainer
    cause = trainer.verdict.cause or Cause.TRAINER_CRASH
    if draft.must_keep_its_settings(trainer.ran_out):
        draft.halt(f"{cause} ({trainer.ran_out}), {KEPT}; {trainer.verdict.reason}")
        return
    overrides, rung_reason = draft.give_way(trainer.ran_out)
    repair = draft.next_repair(cause, TRAINER, progress_at=draft.seen.progress_at, without=NOT_OF_THE_TRAINER)
    # Each rung of the memory ladder is another repair, and the ladder ends: the budget is for the same one again.
    if repair.rung is Rung.HALT and not overrides:
        draft.halt("; ".join(filter(None, [repair.reason, trainer.verdict.reason, rung_reason])))
    elif overrides or draft.is_due(repair):
        reason = "; ".join(filter(None, [trainer.verdict.reason, rung_reason or repair.reason]))
        draft.order(
            RestartTrainer(reason=reason, overrides=overrides), attempt=draft.attempt(cause, TRAINER, Rung.RESTORE)
        )
        if AT_ITS_START & overrides.keys():  # a server holds what it took until it is started anew
            for server in draft.seen.servers:
                draft.order(RestartServer(name=server.name, reason=f"it makes room for the trainer: {rung_reason}"))


def _load(draft: PlanBuilder) -> None:
    """A fresh trainer: the newest checkpoint, or where there is damage the one from before it."""
    incident = draft.seen.incident
    if draft.seen.trainer.verdict.health is not Health.HEALTHY:
        return
    if incident is not None and first_damaged(incident) is not None:
        restore(draft, incident)
        return
    repair = draft.next_repair(Cause.CHECKPOINT_CORRUPT, TRAINER, progress_at=draft.seen.progress_at)
    choice = choose(draft.seen.checkpoints, None, draft.history, draft.config.restore)
    if repair.rung is Rung.HALT or choice.global_step is None:
        draft.halt(f"{repair.reason}; {choice.reason}")
    elif not draft.is_due(repair):
        return
    elif repair.rung is Rung.RETRY:
        attempt = draft.attempt(Cause.CHECKPOINT_CORRUPT, TRAINER, Rung.RETRY, restored_step=choice.global_step)
        draft.order(RestoreTrainer(global_step=choice.global_step, reason=choice.reason), attempt=attempt)
    else:
        attempt = draft.attempt(Cause.CHECKPOINT_CORRUPT, TRAINER, Rung.RESTORE)
        draft.order(RestartTrainer(reason=repair.reason), attempt=attempt)


def _pause_then_restore(draft: PlanBuilder) -> None:
    incident = draft.seen.incident
    if incident is None:
        return
    if not draft.seen.trainer.is_paused:
        draft.order(PauseTrainer(reason=incident.reason))
    else:
        restore(draft, incident)


def restore(draft: PlanBuilder, incident: Incident) -> None:
    """Go back to before `incident`, and condemn what came after. Halts where that can't help."""
    choice = choose(draft.seen.checkpoints, incident, draft.history, draft.config.restore)
    repair = draft.next_repair(incident.cause, TRAINER, progress_at=draft.seen.progress_at, without=NOT_OF_THE_TRAINER)
    if choice.global_step is None or repair.rung is Rung.HALT:
        draft.halt("; ".join([incident.reason, choice.reason if choice.global_step is None else repair.reason]))
    elif draft.is_due(repair):
        _condemn(draft, incident)
        draft.order(
            RestoreTrainer(
                global_step=choice.global_step,
                reason=f"{incident.reason}; {choice.reason}",
                onset_step=incident.onset_step,
            ),
            attempt=draft.attempt(
                incident.cause,
                TRAINER,
                Rung.RESTORE,
                onset_step=incident.onset_step,
                restored_step=choice.global_step,
            ),
        )


def _condemn(draft: PlanBuilder, incident: Incident) -> None:
    damaged = first_damaged(incident)
    if damaged is None:
        return
    if any(checkpoint.global_step >= damaged for checkpoint in newest_first(draft.seen.checkpoints)):
        draft.order(CondemnCheckpoints(after_step=damaged - 1, reason=incident.reason))


def _wait_for_the_verifier(draft: PlanBuilder, incident: Incident) -> None:
    """No restart mends a reward function; a person may, while nothing is lost. After the patience the run says so."""
    give_up_at = incident.since + draft.config.reward_health.verifier_patience_s
    if not draft.seen.trainer.is_paused:
        draft.order(PauseTrainer(reason=incident.reason))
    elif draft.now >= give_up_at:
        draft.halt(f"the reward function is broken: {incident.reason}")
    else:
        draft.wake_at.append(give_up_at)
