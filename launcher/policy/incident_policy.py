"""Which incidents begin and end: (open ones, what is observed) → changes. One for each failure of one subject.

    trouble of a subject without an open incident ─► begins        its subject works again ─► ends, repaired
    another trouble of the same subject           ─► the same one  given up, or the run ends ─► ends, not repaired

So a server that is killed again before it serves is one incident, and so is a batch that a known failure spoilt. What
is known only while it happens (a server that lost its weights, a rejected batch) is passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launcher.base.messages import Cause, Health, Rejection, ServerState
from launcher.policy.actions import Action, Halt, LoadWeights, RestartServer, RestoreTrainer
from launcher.policy.observed import (
    ENDS,
    OF_WEIGHTS,
    TRAINER,
    Observed,
    RunState,
    ServerFacts,
    TrainerFacts,
    holds_damage,
    is_current,
    is_dead,
    is_doubted,
)
from launcher.policy.restart_budget import RepairAttempt

REWARD, POLICY, BATCH, DISK, ENVIRONMENT = "reward", "policy", "batch", "disk", "environment"
CLUSTER, DRIVER, RUN = "cluster", "driver", "run"
OF_LEARNING = frozenset({TRAINER, REWARD, POLICY, BATCH, ENVIRONMENT, CLUSTER, DRIVER, RUN})
"""Subjects whose repair is the trainer's, and after which servers get their weights again."""
OF_THE_MONITOR = frozenset({REWARD, POLICY, ENVIRONMENT})
"""Subjects of incidents that the HealthMonitor alone finds, and sees to be over."""

SUBJECT_OF = {
    Cause.VERIFIER_BROKEN: REWARD,
    Cause.REWARD_COLLAPSE: POLICY,
    Cause.NONFINITE: TRAINER,
    Cause.OUTSIDE_WEIGHTS: ENVIRONMENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong with which subject. `since`: when it began, where that is known better than by this observation."""

    cause: Cause
    subject: str
    reason: str
    onset_step: int | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    """`since` is on the clock of the observer."""

    number: int
    cause: Cause
    subject: str
    since: float
    onset_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    incident: OpenIncident
    reason: str
    is_mended: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentChange:
    begins: tuple[Trouble, ...] = ()
    ends: tuple[Ending, ...] = ()


def incident_changes(
    open_: Sequence[OpenIncident],
    seen: Observed,
    *,
    attempts: Sequence[RepairAttempt] = (),
    damaged: Collection[int] = (),
) -> IncidentChange:
    """What changes with this look. `attempts`: repairs that its plan begins. `damaged`: steps of checkpoints found
    damaged that had no incident yet."""
    if seen.state in ENDS or seen.is_stopped:
        return IncidentChange(ends=end_all(open_, "the run was over first"))
    found = _troubles(seen, attempts, damaged, {one.subject for one in open_})
    troubled = {trouble.subject for trouble in found}
    ends = tuple(ending for one in open_ if one.subject not in troubled and (ending := _ending(one, seen)) is not None)
    if seen.ending is not None or seen.abort_reason or seen.state is RunState.SHUTTING_DOWN:
        return IncidentChange(ends=ends)
    known = {one.subject for one in open_}
    begins = {trouble.subject: trouble for trouble in reversed(found) if trouble.subject not in known}
    return IncidentChange(begins=tuple(reversed(begins.values())), ends=ends)


def end_all(open_: Sequence[OpenIncident], reason: str) -> tuple[Ending, ...]:
    return tuple(Ending(incident=one, reason=reason, is_mended=False) for one in open_)


def subjects_of(rejection: Rejection) -> tuple[str, ...]:
    """Whose failure a batch was rejected for."""
    cause = rejection.cause
    return rejection.subjects or (BATCH if cause is None else SUBJECT_OF.get(cause, BATCH),)


def _troubles(
    seen: Observed,
    attempts: Sequence[RepairAttempt],
    damaged: Collection[int],
    known: Collection[str],
) -> list[Trouble]:
    """The most specific first: of one subject, the first one counts. While a disk is at fault, that is the incident:
    what else fails meanwhile may fail for it, and is looked at again afterwards."""
    if (disk := seen.disk) is not None:
        return [Trouble(cause=Cause.DISK_FULL, subject=DISK, reason=disk.reason, since=disk.since)]
    found = [*_of_servers(seen), *_of_trainer(seen)]
    if (one := seen.incident) is not None:
        found.append(
            Trouble(cause=one.cause, subject=one.subject, reason=one.reason, onset_step=one.onset_step, since=one.since)
        )
    for step in damaged:
        reason = f"the checkpoint of step {step} can't be loaded"
        subject = f"checkpoint {step}"
        found.append(Trouble(cause=Cause.CHECKPOINT_CORRUPT, subject=subject, reason=reason, onset_step=step))
    for batch in seen.rejections:
        cause = batch.cause or Cause.SERVER_CORRUPT
        for subject in subjects_of(batch):
            found.append(Trouble(cause=cause, subject=subject, reason=batch.reason, onset_step=batch.global_step))
    learning = OF_LEARNING & {*known, *(trouble.subject for trouble in found)}
    if not learning and seen.state is not RunState.INITIALIZING:
        found += _of_weights(seen, attempts)
    return found


def _of_servers(seen: Observed) -> list[Trouble]:
    return [
        Trouble(cause=server.verdict.cause or Cause.SERVER_CRASH, subject=server.name, reason=server.verdict.reason)
        for server in seen.servers
        if server.state not in (ServerState.FAILED, ServerState.STOPPED) and (is_dead(server) or is_doubted(server))
    ]


def _of_trainer(seen: Observed) -> list[Trouble]:
    verdict = seen.trainer.verdict
    if verdict.health is not Health.DEAD:
        return []
    return [Trouble(cause=verdict.cause or Cause.TRAINER_CRASH, subject=TRAINER, reason=verdict.reason)]


def _of_weights(seen: Observed, attempts: Sequence[RepairAttempt]) -> list[Trouble]:
    """A server that has lost its weights although the trainer was not restored: the pool or the publisher found it."""
    alive = {server.name: server for server in seen.servers if not is_dead(server)}
    return [
        Trouble(cause=attempt.cause, subject=attempt.subject, reason=_lacks_weights(alive[attempt.subject]))
        for attempt in attempts
        if attempt.cause in OF_WEIGHTS and attempt.subject in alive.keys() - seen.newcomers
    ]


def _lacks_weights(server: ServerFacts) -> str:
    lacks = "it does not hold the trainer's weights"
    return f"{lacks}: {server.stale_reason}" if server.stale_reason else lacks


def _ending(one: OpenIncident, seen: Observed) -> Ending | None:
    """How it ended, None where it has not. No trouble with its subject is seen."""
    trainer = seen.trainer
    for server in seen.servers:
        if server.name == one.subject:
            return _ending_of_server(one, server, seen)
    if not seen.is_judged and one.subject in OF_THE_MONITOR:
        return None  # it is away: that it names no incident says nothing
    # Known answers may be right where the step's own can't be scored: each try of that step was an incident, repaired.
    owes_step = one.subject == REWARD and trainer.next_step == one.onset_step and not trainer.is_finished
    if not _is_stepping(trainer) or owes_step or holds_damage(seen.incident, trainer):
        return None
    if trainer.is_finished:
        return Ending(incident=one, reason="training is done")
    lower = seen.lower_level if one.subject == POLICY else None
    if lower is None or (one.onset_step is not None and lower.since_step < one.onset_step):
        return Ending(incident=one, reason="training continues")
    # The gate drops no more batches in a row. Whether the policy collapsed is only now found, as this incident.
    if not lower.is_settled:
        return None
    stays = f"rewards are lower since step {lower.since_step}, and no collapse was found"
    return Ending(incident=one, reason=f"{stays}: training continues")


def _ending_of_server(one: OpenIncident, server: ServerFacts, seen: Observed) -> Ending | None:
    trainer = seen.trainer
    if server.state is ServerState.FAILED:
        return Ending(incident=one, reason="given up; the run continues without it", is_mended=False)
    if any(getattr(action, "name", "") == server.name for action in seen.under_way):
        return None  # what it does may be seen before it is done, and belongs to the incident
    if server.state is ServerState.READY and (trainer.is_publishing or is_current(server, trainer)):
        return Ending(incident=one, reason="it serves again")
    return None


def _is_stepping(trainer: TrainerFacts) -> bool:
    if trainer.verdict.health is Health.DEAD or not trainer.is_loaded:
        return False
    return trainer.is_finished or not trainer.is_paused


def repair_text(trouble: Trouble, actions: Sequence[Action], *, is_command: bool = False) -> str:
    """What is being done about it, as a short text. `is_command`: as of the trainer."""
    if any(isinstance(action, Halt) for action in actions):
        return "the run is being ended"
    for action in actions:
        match action:
            case RestartServer(name=trouble.subject):
                return "it is being restarted"
            case LoadWeights(name=trouble.subject):
                return "its weights are sent again"
            case RestoreTrainer(condemn_after=int()):
                return "the trainer goes back to a checkpoint from before it"
    if trouble.subject == BATCH:
        return "its prompts are taken again"
    usual = _USUAL | _OF_A_COMMAND if is_command else _USUAL
    return usual.get(trouble.cause, "it is being repaired")


_USUAL = {
    Cause.SERVER_STALE: "its weights are sent again",
    Cause.SERVER_CORRUPT: "its weights are sent again",
    Cause.GPU_FAULT: "it is restarted on the same GPU; where that fails, the run goes on without it, or halts",
    Cause.TRAINER_CRASH: "it is restarted and resumes from its newest state",
    Cause.TRAINER_HANG: "it is restarted and resumes from its newest state",
    Cause.TRAINER_OOM: "it is restarted with less memory",
    Cause.NONFINITE: "nothing of it reaches the weights; where it stays, an earlier checkpoint is restored",
    Cause.REWARD_COLLAPSE: "the batch is dropped; for a fall that stays, an earlier checkpoint is restored",
    Cause.VERIFIER_BROKEN: "no such batch is trained on; where it stays, training waits for known answers to be right",
    Cause.CHECKPOINT_CORRUPT: "an older one is loaded",
    Cause.DISK_FULL: "the run waits, and resumes when it can write again; nothing is restarted",
    Cause.OUTSIDE_WEIGHTS: "the restore is undone, and the run ends for a person",
}
_OF_A_COMMAND = {
    Cause.TRAINER_CRASH: "it is restarted and resumes from its newest whole checkpoint",
    Cause.TRAINER_HANG: "it is stopped, and restarted from its newest whole checkpoint",
    Cause.TRAINER_OOM: "it is restarted as it was; its memory settings are its own",
    Cause.NONFINITE: "it is stopped, and restarted from a checkpoint from before it",
    Cause.REWARD_COLLAPSE: "it is stopped, and restarted from a checkpoint from before it",
    Cause.VERIFIER_BROKEN: "it is stopped, and waits before it for trainer.reward_check to pass",
}
"""A step of it is judged after it was trained on, and the launcher knows none of its settings."""
