"""When a plan has the trainer's other process parked, and when it is let go."""

import pytest

from launcher.base.messages import Cause
from launcher.policy.actions import ParkTrainer, RestartTrainer, UnparkTrainer
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import TriedSettings
from launcher.policy.observed import RunState, StandbyTrainer
from launcher.policy.restart_budget import Rung
from tests.support.simulated_run.looks import (
    MEMORY,
    NOW,
    T_CRASHED,
    attempts,
    dead,
    decide,
    kinds,
    observed,
    server,
    trainer,
)

STEPPED = NOW - 1.0


def look(*servers, standby=StandbyTrainer.EMPTY, **more):
    settings = {"progress_at": STEPPED, "state": RunState.RUNNING, **more}
    return observed(*(servers or (server(),)), standby_trainer=standby, **settings)


def out_of_memory(where):
    return TriedSettings(ran_out=where, settings=MEMORY)


@pytest.mark.parametrize(
    ("standby", "ordered"),
    [
        (StandbyTrainer.NONE, []),
        (StandbyTrainer.UNKNOWN, []),
        (StandbyTrainer.EMPTY, [ParkTrainer]),
        (StandbyTrainer.PARKED, []),
        (StandbyTrainer.HUNG, [ParkTrainer]),
    ],
)
def test_an_empty_one_is_parked_and_one_that_hangs_replaced(standby, ordered):
    assert kinds(decide(look(standby=standby))) == ordered


def test_after_a_restart_the_next_is_parked_as_soon_as_the_run_steps_again():
    """Another end is likelier then, and one that comes before costs a cold start."""
    history = attempts(Rung.RESTORE, cause=Cause.TRAINER_CRASH, subject="trainer")
    assert kinds(decide(look(progress_at=None), history)) == [ParkTrainer]
    assert ParkTrainer not in kinds(decide(look(state=RunState.RESTORING), history))


def test_a_repair_goes_first():
    assert ParkTrainer not in kinds(decide(look(server(0), dead(1))))
    assert kinds(decide(look(trainer=trainer(verdict=T_CRASHED)))) == [RestartTrainer]


@pytest.mark.parametrize("where", [RanOut.SERVER_HOST, RanOut.TRAINER_HOST])
def test_where_the_hosts_memory_ran_out_it_is_the_first_to_give_way(where):
    tried = (out_of_memory(where),)
    assert kinds(decide(look(standby=StandbyTrainer.PARKED, tried=tried))) == [UnparkTrainer]
    assert kinds(decide(look(standby=StandbyTrainer.EMPTY, tried=tried))) == []


def test_one_that_may_be_taking_over_is_not_ended():
    under_way = (RestartTrainer(reason="out of memory"),)
    seen = look(standby=StandbyTrainer.PARKED, tried=(out_of_memory(RanOut.TRAINER_HOST),), under_way=under_way)
    assert kinds(decide(seen)) == []


def test_none_is_parked_beside_a_trainer_that_has_not_loaded_though_nothing_else_is_to_do():
    seen = look(trainer=trainer(is_loaded=False), is_judged=False)
    assert kinds(decide(seen)) == []
