"""The servers' part of a plan: restart the dead, give weights to the stale, admit those that have the right ones."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.base.messages import Cause, Health, Incident, ServerState
from launcher.policy.actions import (
    AbandonServer,
    AdmitServer,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
)
from launcher.policy.observed import ServerFacts, TrainerFacts
from launcher.policy.plan_builder import KEPT, NO_OVERRIDES, PlanBuilder
from launcher.policy.reconcile_trainer import damage_stands, restore
from launcher.policy.restart_budget import Repair, Rung

GONE = frozenset({ServerState.DEAD, ServerState.FAILED})
OF_WEIGHTS = frozenset({Cause.SERVER_STALE, Cause.SERVER_CORRUPT})
OF_ALL = frozenset({Rung.FLEET, Rung.RESTORE})


def is_dead(server: ServerFacts) -> bool:
    return server.state in GONE or server.verdict.health is Health.DEAD


def is_current(server: ServerFacts, trainer: TrainerFacts) -> bool:
    """Does it hold the very weights that the trainer has?"""
    return (server.weight_version, server.lineage) == (trainer.policy_version, trainer.lineage)


def is_homeless(server: ServerFacts) -> bool:
    """It ended with its node, and no other has room for it."""
    return is_dead(server) and server.homeless_since is not None


def mend_servers(draft: PlanBuilder) -> None:
    for server in draft.seen.servers:
        if draft.halt_reason or draft.does(RestartServer, server.name) or server.state is ServerState.STOPPED:
            continue
        if server.name in draft.seen.leaving:
            continue  # it goes as it is
        if is_homeless(server):
            _wait_for_a_node(draft, server)
        elif is_dead(server):
            _repair(draft, server, _cause_of_death(server))
        elif server.is_loading or draft.does(LoadWeights, server.name) or draft.does(AdmitServer, server.name):
            continue  # its outcome is not known: the next rung would be a guess
        elif server.verdict.health is Health.SUSPECT and server.verdict.cause in OF_WEIGHTS:
            _repair(draft, server, server.verdict.cause)
        elif server.state in (ServerState.STALE, ServerState.READY) and _weights_can_be_had(draft):
            _bring_up_to_date(draft, server)


def _weights_can_be_had(draft: PlanBuilder) -> bool:
    """The trainer holds weights that servers should have, and isn't handing them out itself."""
    trainer = draft.seen.trainer
    return (
        trainer.is_loaded
        and trainer.verdict.health is not Health.DEAD
        and not trainer.is_publishing
        and not damage_stands(draft.seen.incident, trainer)
        and not draft.does(RestoreTrainer)
        and not draft.does(RestartTrainer)
    )


def _bring_up_to_date(draft: PlanBuilder, server: ServerFacts) -> None:
    if not is_current(server, draft.seen.trainer):
        _repair(draft, server, Cause.SERVER_STALE)
    elif server.state is ServerState.STALE:
        draft.order(AdmitServer(name=server.name), reason=f"{server.name} holds the current weights")


def _repair(draft: PlanBuilder, server: ServerFacts, cause: Cause) -> None:
    """One rung for one server. What concerns all is no rung while another one may yet do the work."""
    if draft.must_keep_its_settings(server.ran_out):
        draft.halt(f"{cause} of {server.name} ({server.ran_out}), {KEPT}; {server.verdict.reason}")
        return
    others = [other for other in draft.seen.servers if other.name != server.name and _may_work(draft, other)]
    of_all = {Rung.FLEET} if len(draft.seen.servers) == 1 else set()
    without = OF_ALL if others else frozenset(of_all)
    repair = draft.next_repair(cause, server.name, progress_at=server.progress_at, without=without)
    overrides, rung_reason = draft.give_way(server.ran_out)
    if overrides:
        _restart(draft, server, cause, f"{server.verdict.reason}; {rung_reason}")
    elif repair.rung is Rung.HALT:
        _give_up(draft, server, f"{repair.reason}; {server.verdict.reason}", others)
    elif draft.is_due(repair):
        _perform(draft, server, cause, repair)


def _wait_for_a_node(draft: PlanBuilder, server: ServerFacts) -> None:
    """No restart makes room. The others go on without it; where there is none, the run waits for a node, and halts."""
    assert server.homeless_since is not None
    if any(not is_homeless(other) and _may_work(draft, other) for other in draft.seen.servers):
        return
    give_up_at = server.homeless_since + draft.config.cluster.node_wait_s
    if draft.now < give_up_at:
        draft.reasons.append(f"{server.name} waits for a node with room for it")
        draft.wake_at.append(give_up_at)
    else:
        waited = f"for {draft.now - server.homeless_since:.0f} s (cluster.node_wait_s)"
        draft.halt(f"{server.verdict.reason}; no node has had room for any server {waited}")


def _cause_of_death(server: ServerFacts) -> Cause:
    return server.verdict.cause or Cause.SERVER_CRASH


def _may_work(draft: PlanBuilder, server: ServerFacts) -> bool:
    """It lives, is being restarted, or has restarts of its own left."""
    if server.name in draft.seen.leaving:
        return False
    if not is_dead(server) or draft.does(RestartServer, server.name):
        return server.state is not ServerState.STOPPED
    own = draft.next_repair(_cause_of_death(server), server.name, progress_at=server.progress_at, without=OF_ALL)
    return own.rung is not Rung.HALT


def _give_up(draft: PlanBuilder, server: ServerFacts, reason: str, others: Sequence[ServerFacts]) -> None:
    """The run goes on with the others; while none of them is ready yet, it waits for how they fare."""
    if not others:
        draft.halt(reason)
    elif server.state is not ServerState.FAILED and any(other.state is ServerState.READY for other in others):
        draft.order(AbandonServer(name=server.name, reason=reason))


def _perform(draft: PlanBuilder, server: ServerFacts, cause: Cause, repair: Repair) -> None:
    match repair.rung:
        case Rung.RETRY:
            _load_weights(draft, server, cause)
        case Rung.SERVER:
            _restart(draft, server, cause, f"{server.verdict.reason}; {repair.reason}")
        case Rung.FLEET:
            _restart_all(draft, server, cause, repair.reason)
            draft.attempts.append(draft.attempt(cause, server.name, Rung.FLEET))
        case _:
            _restore_and_restart_all(draft, server, cause, repair.reason)


def _load_weights(draft: PlanBuilder, server: ServerFacts, cause: Cause) -> None:
    if not _weights_can_be_had(draft):
        return
    trainer = draft.seen.trainer
    draft.order(
        LoadWeights(name=server.name, version=trainer.policy_version, lineage=trainer.lineage),
        reason=f"{server.name} gets version {trainer.policy_version}",
        attempt=draft.attempt(cause, server.name, Rung.RETRY),
    )


def _restart(draft: PlanBuilder, server: ServerFacts, cause: Cause, reason: str) -> None:
    overrides, _ = draft.give_way(server.ran_out)
    draft.order(
        RestartServer(name=server.name, reason=reason, overrides=overrides),
        attempt=draft.attempt(cause, server.name, Rung.SERVER),
    )


def _restart_all(draft: PlanBuilder, because_of: ServerFacts, cause: Cause, reason: str) -> None:
    for server in draft.seen.servers:
        draft.order(
            RestartServer(name=server.name, reason=f"{cause} of {because_of.name}: {reason}", overrides=NO_OVERRIDES)
        )


def _restore_and_restart_all(draft: PlanBuilder, server: ServerFacts, cause: Cause, reason: str) -> None:
    """Servers that die with fresh processes may die of the weights: go back to ones that are certified good."""
    trainer = draft.seen.trainer
    draft.restore_reason = reason
    if draft.does(RestoreTrainer) or draft.does(RestartTrainer) or not trainer.is_loaded:
        return
    if not trainer.is_paused:
        draft.order(PauseTrainer(reason=reason))
        return
    incident = Incident(cause=cause, subject=server.name, reason=reason, since=draft.now, onset_step=trainer.next_step)
    restore(draft, incident)
    if draft.does(RestoreTrainer):
        _restart_all(draft, server, cause, reason)
