"""The servers' part of a plan: restart the dead, give weights to the stale, admit those that have the right ones."""

from __future__ import annotations

from launcher.base.messages import Cause, Health, ServerState
from launcher.policy.actions import (
    AbandonServer,
    AdmitServer,
    LoadWeights,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
)
from launcher.policy.observed import ServerFacts, TrainerFacts
from launcher.policy.plan_builder import KEPT, PlanBuilder
from launcher.policy.reconcile_trainer import holds_damage
from launcher.policy.restart_budget import Repair, Rung

GONE = frozenset({ServerState.DEAD, ServerState.FAILED})
OF_WEIGHTS = frozenset({Cause.SERVER_STALE, Cause.SERVER_CORRUPT})
NOT_OF_A_SERVER = frozenset({Rung.RESTORE})
"""What no weights cause must throw no step away (P12), and what they do is another attempt's: it loads a checkpoint."""
UNDECIDED = (LoadWeights, AdmitServer)
LIVING = frozenset({ServerState.STALE, ServerState.READY})


def is_dead(server: ServerFacts) -> bool:
    return server.state in GONE or server.verdict.health is Health.DEAD


def is_doubted(server: ServerFacts) -> bool:
    """Its weights are."""
    return server.verdict.health is Health.SUSPECT and server.verdict.cause in OF_WEIGHTS


def is_current(server: ServerFacts, trainer: TrainerFacts) -> bool:
    """Does it hold the very weights that the trainer has?"""
    return (server.weight_version, server.lineage) == (trainer.policy_version, trainer.lineage)


def is_unschedulable(server: ServerFacts) -> bool:
    """It ended with its node, and Ray has found no other for it."""
    return is_dead(server) and server.unschedulable_since is not None


def reconcile_servers(builder: PlanBuilder) -> None:
    for server in builder.seen.servers:
        if builder.halt_reason or builder.does(RestartServer, server.name) or server.state is ServerState.STOPPED:
            continue
        if not builder.seen.stays(server.name):
            continue
        if is_unschedulable(server):
            _wait_for_node(builder, server)
        elif is_dead(server):
            _repair(builder, server, _cause_of(server))
        elif server.is_loading or any(builder.does(kind, server.name) for kind in UNDECIDED):
            continue  # its outcome is not known: the next rung would be a guess
        elif is_doubted(server):
            _repair(builder, server, _cause_of(server))
        elif server.state in LIVING and _weights_can_be_had(builder):
            _bring_up_to_date(builder, server)


def _weights_can_be_had(builder: PlanBuilder) -> bool:
    """The trainer holds weights that servers should have, and isn't handing them out itself."""
    return trainer_has_weights(builder) and not builder.seen.trainer.is_publishing


def trainer_has_weights(builder: PlanBuilder) -> bool:
    """Weights that servers should have."""
    trainer = builder.seen.trainer
    return (
        trainer.is_loaded
        and trainer.verdict.health is not Health.DEAD
        and not holds_damage(builder.seen.incident, trainer)
        and not builder.does(RestoreTrainer)
        and not builder.does(RestartTrainer)
    )


def _bring_up_to_date(builder: PlanBuilder, server: ServerFacts) -> None:
    if not is_current(server, builder.seen.trainer):
        _repair(builder, server, Cause.SERVER_STALE)
    elif server.state is not ServerState.READY:
        builder.order(AdmitServer(name=server.name), reason=f"{server.name} holds the current weights")


def _repair(builder: PlanBuilder, server: ServerFacts, cause: Cause) -> None:
    """Its own restarts; then the run goes on without it, or where no other may do the work halts."""
    if builder.rests(RestartServer, server.name):
        return  # nothing is counted against a budget for it
    if not is_dead(server) and builder.rests(LoadWeights, server.name):
        return  # of a dead one it failed for its death, which is repaired at once
    is_spared = _another_may_work(builder, server)
    if builder.must_keep_its_settings(server.ran_out):
        reason = f"{cause} of {server.name} ({server.ran_out}), {KEPT}; {server.verdict.reason}"
        _give_up(builder, server, reason, is_spared=False, may_pass=False)
        return
    repair = _next_repair(builder, server, cause)
    overrides, rung_reason = builder.give_way(server.ran_out, server.verdict.reason)
    if overrides:
        _restart(builder, server, cause, f"{server.verdict.reason}; {rung_reason}")
    elif repair.rung is Rung.HALT:
        reason, may_pass = f"{repair.reason}; {server.verdict.reason}", repair.may_pass and server.ran_out is None
        _give_up(builder, server, reason, is_spared=is_spared, may_pass=may_pass)
    elif not builder.is_due(repair):
        return
    elif repair.rung is Rung.RETRY:
        _load_weights(builder, server, cause)
    else:
        _restart(builder, server, cause, f"{server.verdict.reason}; {repair.reason}")


def _wait_for_node(builder: PlanBuilder, server: ServerFacts) -> None:
    """The others continue without it; where there is none, the run waits for a node, and halts at last."""
    assert server.unschedulable_since is not None
    if not any(not is_unschedulable(other) and _may_work(builder, other) for other in builder.seen.servers):
        end = f"{server.verdict.reason}; Ray has found no node for any server"
        builder.wait_for_node(server.name, server.unschedulable_since, end)


def _cause_of(server: ServerFacts) -> Cause:
    return server.verdict.cause or Cause.SERVER_CRASH


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


def _next_repair(builder: PlanBuilder, server: ServerFacts, cause: Cause) -> Repair:
    return builder.next_repair(cause, server.name, progress_at=server.progress_at, without=NOT_OF_A_SERVER)


def _give_up(builder: PlanBuilder, server: ServerFacts, reason: str, *, is_spared: bool, may_pass: bool) -> None:
    """The run continues with the others; while none of them is ready yet, it waits for them."""
    if not is_spared:
        builder.halt(reason, may_pass=may_pass)
    elif server.state is not ServerState.FAILED and any(
        other.name != server.name and other.state is ServerState.READY and _may_work(builder, other)
        for other in builder.seen.servers
    ):
        builder.order(AbandonServer(name=server.name, reason=reason))


def _load_weights(builder: PlanBuilder, server: ServerFacts, cause: Cause) -> None:
    if not _weights_can_be_had(builder):
        return
    trainer = builder.seen.trainer
    builder.order(
        LoadWeights(name=server.name, version=trainer.policy_version, lineage=trainer.lineage),
        reason=f"{server.name} gets version {trainer.policy_version}",
        attempt=builder.attempt(cause, server.name, Rung.RETRY),
    )


def _restart(builder: PlanBuilder, server: ServerFacts, cause: Cause, reason: str) -> None:
    overrides, _ = builder.give_way(server.ran_out, server.verdict.reason)
    builder.order(
        RestartServer(name=server.name, reason=reason, overrides=overrides),
        attempt=builder.attempt(cause, server.name, Rung.SERVER),
    )
