"""A plan against what is true in the model of a run, of which the plan saw only what can be observed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.base.messages import Cause, ServerState
from launcher.policy.actions import (
    Action,
    AdmitServer,
    LoadWeights,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
)
from launcher.policy.checkpoint_status import CheckpointStatus
from launcher.policy.observed import Observed, RecoveryPlan
from launcher.policy.reconcile_trainer import holds_damage
from launcher.policy.restore import FIRST_WEIGHTS

if TYPE_CHECKING:
    from tests.support.simulated_run.recovery_world import World


def check_plan(world: World, seen: Observed, made: RecoveryPlan) -> None:
    """Raises AssertionError where an action is one that the truth forbids."""
    busy = {(type(action), getattr(action, "name", "")) for action in seen.under_way}
    ordered = [(type(action), getattr(action, "name", "")) for action in made.actions]
    assert len(set(ordered)) == len(ordered), "ordered twice"
    assert not busy & set(ordered), "ordered while under way"
    for action in made.actions:
        _check_action(world, action, seen, made)


def _check_action(world: World, action: Action, seen: Observed, made: RecoveryPlan) -> None:
    damage = holds_damage(seen.incident, seen.trainer)
    match action:
        case RestartServer(name=name):
            server = world.server(name)
            sick = server.state in (ServerState.DEAD, ServerState.FAILED) or server.cause is not None
            stale = server.weights != (world.trainer.next_step, world.trainer.lineage)
            assert sick or stale, f"{name} was healthy"
        case AdmitServer(name=name):
            assert world.server(name).weights == (world.trainer.next_step, world.trainer.lineage)
        case LoadWeights(version=version, lineage=lineage):
            assert (version, lineage) == (world.trainer.next_step, world.trainer.lineage)
            assert world.trainer.cause is None
            assert world.trainer.is_loaded
            assert not damage
        case ResumeTrainer():
            assert world.serving(), "resumed with nobody to serve it"
            assert not damage, "resumed on damage"
            assert world.verifier_broke_at is None, "resumed on a broken verifier"
        case PauseTrainer():
            assert not world.trainer.is_paused
        case RestartTrainer():
            assert world.trainer.cause is not None or not world.trainer.is_loaded, "the trainer was healthy"
        case RestoreTrainer(global_step=step):
            assert world.trainer.is_paused
            assert step == FIRST_WEIGHTS or step in world.checkpoints
            if step != FIRST_WEIGHTS:
                assert world.checkpoints[step].is_complete
                assert world.checkpoints[step].status is not CheckpointStatus.CONDEMNED
            if seen.incident is not None and seen.incident.cause is Cause.REWARD_COLLAPSE:
                assert step not in world.damaged_checkpoints, "restored the damage"
        case _:
            pass
