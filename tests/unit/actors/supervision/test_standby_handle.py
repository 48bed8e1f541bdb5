"""The trainer's other actor: when it takes over, when it does not, and who is the trainer then."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.cluster.actor_calls import ActorAway
from actors.supervision import standby_handle, trainer_handle
from actors.supervision.standby_handle import StandbyHandle
from actors.supervision.trainer_handle import TrainerHandle
from launcher.base.errors import TrainerError
from launcher.base.messages import TrainerView
from launcher.base.rank_location import RankLocation
from launcher.config.supervision import HealthConfig
from launcher.policy.observed import StandbyTrainer
from tests.support.fake_actors import FakeActor, never
from tests.support.machine import scaled

STEPPING = TrainerView(pid=1, node="here", is_started=True, is_loaded=True, is_allowed=True, is_running=True)
EMPTY = TrainerView(pid=2, node="here")
PARKED = dataclasses.replace(EMPTY, is_parked=True)
PARKING = dataclasses.replace(EMPTY, busy="parking")
HUNG_AFTER_S = 0.05


class Trainers:
    """Two actors; `views` are what they say of themselves. `first` is the trainer, silent once it `ended`."""

    def __init__(self, other=PARKED, **methods):
        self.views = {"first": STEPPING, "other": other}
        self.ended = False
        self.killed = []
        self.written = []
        self.asked_in_vain = asyncio.Event()
        self.actors = {name: self._actor(name, **methods) for name in self.views}

    def _actor(self, name, **methods):
        usual = {"start": "ready", "run": never, "hurry": False}
        return FakeActor(view=lambda: self._view(name), **{**usual, **methods})

    async def _view(self, name):
        if name == "first" and self.ended:
            raise ActorAway("it is being restarted")
        if self.views[name] is None:
            self.asked_in_vain.set()
            await never()
        return self.views[name]

    @asynccontextmanager
    async def handles(self):
        changed = asyncio.Event()
        standby = StandbyHandle(
            self.actors["other"],
            ("first", "other"),
            took_over=self._write,
            changed=changed,
            hung_after_s=HUNG_AFTER_S,
        )
        trainer = TrainerHandle(
            self.actors["first"],
            ended=[].append,
            changed=changed,
            health=HealthConfig(trainer_first_s=5.0),
            log=Path("no such log"),
            standby=standby,
        )
        await trainer.probe.refresh()
        await standby.probe.refresh()
        try:
            yield trainer, standby
        finally:
            await trainer.close()
            await standby.close()

    async def _write(self, name, actor):
        assert "start" not in actor.calls, "written down before it gets an order"
        self.written.append(name)

    def end_first(self, trainer):
        """Its pidfd has shown it."""
        self.ended = True
        trainer._end = trainer_handle.ProcessEnd(trainer._process)

    def started(self):
        return [name for name, actor in self.actors.items() if "start" in actor.calls]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    for name in ("LOOK_S", "SOON_S", "NEW_S"):
        monkeypatch.setattr(standby_handle, name, 0.02)
    for name in ("ANSWER_S", "PROMPT_S"):  # within which one that answers does, also where the machine is busy
        monkeypatch.setattr(standby_handle, name, 0.3)
    for name in ("PARKING_S", "HURRIED_S", "PARK_S", "NEW_PROCESS_S"):
        monkeypatch.setattr(standby_handle, name, 0.02)
    for name in ("ANSWER_S", "LOOK_S", "SOON_S"):
        monkeypatch.setattr(trainer_handle, name, 0.02)
    monkeypatch.setattr(trainer_handle, "RESTART_S", 0.1)
    monkeypatch.setattr(trainer_handle, "is_here", lambda node: False)  # these pids are nobody's


def restarted(trainers, monkeypatch, name="first"):
    """Whoever kills it finds an empty process the next time."""

    def kill(actor, no_restart):
        trainers.killed.append(next(key for key, one in trainers.actors.items() if one is actor))
        trainers.ended = False
        trainers.views[name] = TrainerView(pid=9, node="here")

    for module in (trainer_handle, standby_handle):
        monkeypatch.setattr(module.ray, "kill", kill)


async def test_the_parked_one_takes_over_and_the_first_stands_by_next():
    trainers = Trainers()
    async with trainers.handles() as (trainer, standby):
        trainers.end_first(trainer)
        await trainer.start({})
        taken, next_one = trainer.actor, standby.actor
    assert (taken, next_one) == (trainers.actors["other"], trainers.actors["first"])
    assert (trainers.started(), trainers.written) == (["other"], ["other"])


async def test_the_process_that_ray_starts_for_the_first_is_seen_without_being_waited_for(monkeypatch):
    monkeypatch.setattr(standby_handle, "NEW_PROCESS_S", 5.0)
    trainers = Trainers()
    async with trainers.handles() as (trainer, standby):
        trainers.end_first(trainer)
        await trainer.start({})
        assert standby.state is StandbyTrainer.UNKNOWN
        trainers.ended = False
        trainers.views["first"] = TrainerView(pid=5, node="here")
        while standby.state is StandbyTrainer.UNKNOWN:
            await asyncio.sleep(0.001)
        assert standby.state is StandbyTrainer.EMPTY


async def test_an_answer_of_the_one_that_ended_is_not_taken_for_the_new_ones():
    trainers = Trainers()
    async with trainers.handles() as (trainer, _):
        late = await trainer._ask_view()
        trainers.end_first(trainer)
        await trainer.start({})
        trainer._take_view(late)
        assert trainer.view.pid == PARKED.pid


async def test_one_that_hangs_is_ended_before_the_parked_one_takes_over(monkeypatch):
    """Else two trainers might step."""
    monkeypatch.setattr(trainer_handle, "RESTART_S", scaled(10))
    trainers = Trainers()
    restarted(trainers, monkeypatch)
    async with trainers.handles() as (trainer, _):
        await trainer.start({})
    assert (trainers.killed, trainers.started()) == (["first"], ["other"])


async def test_the_end_of_one_that_is_killed_is_enough_though_ray_answers_for_its_successor_much_later(monkeypatch):
    """A question that is asked between the two waits for the new process, and the parked one is ready now."""
    trainers = Trainers()
    async with trainers.handles() as (trainer, _):

        def kill(actor, no_restart):
            trainers.killed.append("first")
            trainers.views["first"] = None
            asyncio.run_coroutine_threadsafe(end(), loop)

        async def end():
            await trainers.asked_in_vain.wait()
            trainer._end = trainer_handle.ProcessEnd(trainer._process)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(trainer_handle.ray, "kill", kill)
        for name in ("ANSWER_S", "RESTART_S"):
            monkeypatch.setattr(trainer_handle, name, 3600.0)
        await trainer.start({})
    assert (trainers.killed, trainers.started()) == (["first"], ["other"])


async def test_each_rank_is_parked_for_its_gpu_and_a_successor_knows_who_must_be_gone_before_it_loads():
    ranks = (RankLocation(node="here", pid=11, gpus="5"), RankLocation(node="there", pid=12, gpus="0"))
    given = []
    trainers = Trainers(stand_by=lambda *arguments: given.append(arguments) or 2, start=lambda *its: given.append(its))
    trainers.views["first"] = dataclasses.replace(STEPPING, gpus="4", ranks=ranks)
    async with trainers.handles() as (trainer, standby):
        await standby.park({}, trainer.view)
        trainers.end_first(trainer)
        trainer._take_view((trainer.actor, TrainerView(pid=5, node="here"), 0))  # the empty process that Ray started
        await trainer.start({})
    assert given == [({}, "4", standby_handle.NICENESS, ranks), ({}, ranks, "4")]


async def test_a_coordinator_that_is_new_after_a_take_over_takes_nobodys_ranks_for_those_of_before():
    """The parked ones would wait for themselves to be gone."""
    given = []
    trainers = Trainers(start=lambda *its: given.append(its))
    own = (RankLocation(node="here", pid=21, gpus="5"),)
    trainers.views["first"] = dataclasses.replace(PARKED, gpus="4", ranks=own)
    async with trainers.handles() as (trainer, _):
        await trainer.start({})
    assert given == [({}, (), "")]


async def test_one_that_can_not_be_ended_is_not_replaced(monkeypatch):
    trainers = Trainers()
    monkeypatch.setattr(trainer_handle.ray, "kill", lambda actor, no_restart: None)
    async with trainers.handles() as (trainer, _):
        with pytest.raises(TrainerError, match="no empty trainer process"):
            await trainer.start({})
    assert (trainers.started(), trainers.written) == ([], [])


@pytest.mark.parametrize(
    "other",
    [None, PARKING, dataclasses.replace(PARKED, is_started=True)],
    ids=["hangs", "is still being parked", "was the trainer"],
)
async def test_one_that_is_not_ready_in_a_moment_leaves_it_to_a_cold_start(other):
    trainers = Trainers(other)
    async with trainers.handles() as (trainer, _):
        trainers.end_first(trainer)
        trainers.ended = False
        trainers.views["first"] = TrainerView(pid=5, node="here")
        await trainer.start({})
    assert (trainers.started(), trainers.written) == (["first"], [])


@pytest.mark.parametrize(("hurries", "patience"), [(False, "PARKING_S"), (True, "HURRIED_S"), (never, "PARKING_S")])
async def test_one_that_is_parked_soon_is_hurried_and_waited_for(monkeypatch, hurries, patience):
    """Longer where its priority could be raised."""
    trainers = Trainers(PARKING, hurry=hurries)
    monkeypatch.setattr(standby_handle, patience, 5.0)
    async with trainers.handles() as (trainer, _):
        trainers.end_first(trainer)
        starting = asyncio.ensure_future(trainer.start({}))
        while trainers.actors["other"].calls.count("view") < 4:
            await asyncio.sleep(0)
        trainers.views["other"] = PARKED
        await starting
    assert (trainers.started(), trainers.actors["other"].calls.count("hurry")) == (["other"], 1)


@pytest.mark.parametrize(("gpus", "started"), [("", ["other"]), ("3", ["first"])])
async def test_an_empty_one_takes_over_where_it_needs_to_know_no_gpu(gpus, started):
    trainers = Trainers(EMPTY)
    trainers.views["first"] = dataclasses.replace(STEPPING, gpus=gpus)
    async with trainers.handles() as (trainer, _):
        trainers.end_first(trainer)
        trainers.ended = False
        trainers.views["first"] = TrainerView(pid=5, node="here")
        await trainer.start({})
    assert trainers.started() == started


async def test_an_empty_one_is_not_preferred_to_an_empty_trainer():
    trainers = Trainers(EMPTY)
    trainers.views["first"] = TrainerView(pid=1, node="here")
    async with trainers.handles() as (trainer, _):
        await trainer.start({})
    assert trainers.started() == ["first"]


async def test_its_loop_is_run_though_that_of_the_first_has_not_been_heard_to_end():
    trainers = Trainers()
    async with trainers.handles() as (trainer, _):
        trainer.adopt()  # waits for the loop of the first
        await asyncio.sleep(0)
        trainers.end_first(trainer)
        await trainer.start({})
        trainers.views["other"] = dataclasses.replace(STEPPING, pid=2)
        await trainer.probe.refresh()
        await asyncio.sleep(0)
    assert [trainers.actors[name].calls.count("run") for name in ("first", "other")] == [1, 1]


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (EMPTY, StandbyTrainer.EMPTY),
        (PARKED, StandbyTrainer.PARKED),
        (PARKING, StandbyTrainer.UNKNOWN),
        (STEPPING, StandbyTrainer.HUNG),
    ],
)
async def test_its_state_is_what_it_says(view, state):
    async with Trainers(view).handles() as (_, standby):
        assert standby.state is state


async def test_one_that_is_stopped_while_it_is_parked_is_ended_and_another_one_is_parked(monkeypatch):
    monkeypatch.setattr(standby_handle, "NEW_PROCESS_S", scaled(10))
    trainers = Trainers(PARKED, stand_by=None)
    restarted(trainers, monkeypatch, "other")
    async with trainers.handles() as (_, standby):
        trainers.views["other"] = None
        while standby.state is not StandbyTrainer.HUNG:
            await standby.probe.refresh()
        await standby.park({}, STEPPING)
        assert standby.state is StandbyTrainer.EMPTY  # the fake stays empty; the order reached it
    assert (trainers.killed, trainers.actors["other"].calls.count("stand_by")) == (["other"], 1)


async def test_one_that_does_not_answer_for_a_moment_is_not_ended(monkeypatch):
    monkeypatch.setattr(standby_handle, "ANSWER_S", 0.02)
    trainers = Trainers()
    async with trainers.handles() as (_, standby):
        trainers.views["other"] = None
        await standby.probe.refresh()
        while standby.probe.is_fresh(standby_handle.LOOK_S + standby_handle.ANSWER_S):
            await asyncio.sleep(0.005)
        assert standby.probe.unanswered == 1
        assert standby.state is StandbyTrainer.UNKNOWN


async def test_one_whose_parking_never_ends_is_hung_though_it_answers(monkeypatch):
    """It was busy for ever: no other was parked, and the next trainer that died started cold."""
    trainers = Trainers(PARKING)
    async with trainers.handles() as (_, standby):
        monkeypatch.setattr(standby_handle, "PARK_S", 1e6)
        assert standby.state is StandbyTrainer.UNKNOWN
        monkeypatch.setattr(standby_handle, "PARK_S", 0.0)
        assert standby.state is StandbyTrainer.HUNG
