"""What the Coordinator is told of the trainer, and that no order whose answer is lost is waited for for ever."""

import asyncio
import dataclasses
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ray._common import signature

from actors.cluster.actor_calls import ActorAway
from actors.supervision import trainer_handle
from actors.supervision.trainer_handle import TrainerHandle
from launcher.base.errors import LauncherError, RunError, TrainerError
from launcher.base.messages import Cause, Health, LoopFailure, TrainerView
from launcher.config.supervision import HealthConfig
from tests.support.fake_actors import FakeActor, Method, never
from tests.support.machine import scaled

EMPTY = TrainerView(pid=1)
LOADED = TrainerView(pid=1, is_started=True, is_loaded=True)


class World:
    """`view` is what the trainer's actor says of itself."""

    def __init__(self, view=LOADED, **methods):
        self.view = view
        self.ended = []
        self.actor = FakeActor(view=lambda: self.view, **methods)

    @asynccontextmanager
    async def link(self):
        health, changed = HealthConfig(trainer_first_s=0.05), asyncio.Event()
        link = TrainerHandle(
            self.actor, ended=self.ended.append, changed=changed, health=health, log=Path("no such log")
        )
        try:
            yield link
        finally:
            await link.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    for name in ("ANSWER_S", "LOOK_S", "SOON_S", "RESTART_S"):
        monkeypatch.setattr(trainer_handle, name, 0.02)
    monkeypatch.setattr(trainer_handle.ray, "kill", lambda actor, no_restart: None)


async def test_the_last_order_has_its_own_time_for_an_answer():
    """A busy machine must not cost the save of the end."""

    async def late(save):
        await asyncio.sleep(0.2)
        world.view = dataclasses.replace(LOADED, is_running=False)

    world = World(dataclasses.replace(LOADED, is_running=True), pause=late)
    async with world.link() as link:
        await link.probe.refresh()
        with pytest.raises(ActorAway):
            await link.pause(save=True)
        await link.pause(save=True, within_s=scaled(30))
        assert not link.view.is_running


async def test_one_that_was_allowed_to_step_though_nobody_heard_it_is_told_to():
    """Its control threads may be late with the answer; allowed and never run it would stand still for ever."""

    async def late():
        world.view = dataclasses.replace(LOADED, is_allowed=True)
        await never()

    world = World(allow=late, run=never)
    async with world.link() as link:
        with pytest.raises(ActorAway):
            await link.resume()
        await link.probe.refresh()
        await asyncio.sleep(0)
        await link.probe.refresh()
        await asyncio.sleep(0)
        assert (world.actor.calls.count("run"), link.facts().is_paused) == (1, False)


async def test_a_restore_that_does_not_end_is_a_hang_however_busy_it_says_it_is():
    async def restore(*args):
        world.view = dataclasses.replace(LOADED, is_loaded=False, busy="restoring")
        await never()

    world = World(restore=restore)
    async with world.link() as link:
        await link.probe.refresh()
        before = link.facts().verdict.health
        with pytest.raises(LauncherError):
            await link.restore(4, 2, 1)
        await link.probe.refresh()
        after = link.facts().verdict
    assert before is Health.UNKNOWN  # not looked at yet
    assert (after.health, after.cause) == (Health.DEAD, Cause.TRAINER_HANG)


async def test_a_start_that_an_earlier_coordinator_ordered_has_a_deadline_too():
    world = World(dataclasses.replace(EMPTY, busy="starting"))
    async with world.link() as link:
        await link.probe.refresh()
        soon = link.facts().verdict.health
        while link.facts().verdict.health is soon:
            await asyncio.sleep(0.005)
        late = link.facts().verdict
    assert soon is Health.UNKNOWN
    assert (late.health, late.cause) == (Health.DEAD, Cause.TRAINER_HANG)
    assert "starting for" in late.reason


@pytest.mark.parametrize(("error", "told"), [(TrainerError("no tokenizer"), "no tokenizer"), (ActorAway("died"), "")])
async def test_a_start_that_fails_is_told_in_its_own_words_and_a_kill_has_none(error, told):
    """Words that come again end the run; after a kill another attempt may go on. "its process ended" was said of it."""

    async def start(overrides, before, gpus):
        raise error

    world = World(EMPTY, start=start)
    async with world.link() as link:
        with pytest.raises(LauncherError):
            await link.start({})
        facts = link.facts()
    assert (facts.told, facts.verdict.health) == (told, Health.DEAD)
    assert facts.verdict.reason == (told or "its process ended")


async def test_a_start_that_its_class_does_not_take_is_a_failure_of_the_trainer():
    """Ray raised the TypeError in the Coordinator, which passed for what had failed."""
    world = World(EMPTY)
    world.actor.start = Method(ray_method(OlderTrainer.start))
    async with world.link() as link:
        await link.probe.refresh()
        with pytest.raises(
            RunError, match=r"the trainer failed: .* of start: TypeError\('too many positional arguments'\)"
        ):
            await link.start({})
        assert "the trainer failed" in link.facts().told
    with pytest.raises(RunError, match=r"the trainer failed: .* of park: AttributeError"):
        await link.call("park")


class OlderTrainer:
    def start(self, overrides):
        raise AssertionError("it is never reached")


def ray_method(function):
    """As Ray checks the arguments before it sends a call."""
    parameters = signature.extract_signature(function, ignore_first=True)
    return lambda *args, **kwargs: signature.flatten_args(parameters, args, kwargs)


async def test_what_ended_its_loop_is_told():
    world = World(dataclasses.replace(LOADED, failure=LoopFailure(kind="KeyError", message="'answer'", global_step=7)))
    async with world.link() as link:
        await link.probe.refresh()
        assert link.facts().told == "KeyError: 'answer'"


async def test_one_that_no_machine_has_room_for_is_not_waited_for_for_ever():
    """Ray keeps an actor that it can't place pending, and silent, without end."""
    world = World()
    world.actor.view.remote = never
    async with world.link() as link:
        link.expect()
        expected = link.facts().verdict.health
        with pytest.raises(TrainerError, match="no empty trainer process"):
            await link.start({})
        assert (expected, link.facts().verdict.health) == (Health.UNKNOWN, Health.DEAD)


async def test_a_view_that_fails_costs_one_look_and_not_all_later_ones():
    answers = [KeyError("a defect"), LOADED]

    def view():
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            from ray.exceptions import RayTaskError

            raise RayTaskError("view", "traceback", answer)
        return answer

    world = World()
    world.actor = FakeActor(view=view)
    async with world.link() as link:
        link.begin_looking()
        async with asyncio.timeout(10):
            while link.view.pid != 1:
                await asyncio.sleep(0.005)
        assert link.view == LOADED


async def test_the_death_of_a_task_that_looks_is_not_kept_to_itself(monkeypatch):
    world = World()
    with pytest.raises(KeyError, match="a defect"):
        async with world.link() as link:
            monkeypatch.setattr(link._liveness, "observe_view", lambda *args, **kwargs: {}["a defect"])
            link.begin_looking()
            async with asyncio.timeout(10):
                while True:
                    link.facts()
                    await asyncio.sleep(0.005)


async def test_while_it_is_being_restarted_what_it_said_before_is_not_what_it_holds():
    """Else its incident would be over, with "training continues", while it is still loading its model."""
    world = World(view=dataclasses.replace(LOADED, is_allowed=True, is_running=True), run=never)
    async with world.link() as link:
        await link.probe.refresh()
        before = link.facts()
        link.expect()
        assert (before.is_loaded, link.facts().is_loaded) == (True, False)


async def test_a_log_on_a_disk_that_stalls_does_not_stop_the_loop(monkeypatch):
    """The loop answers the liveness ping, so whoever blocks it gets the Coordinator killed."""
    stall = threading.Event()
    monkeypatch.setattr(trainer_handle, "size_of", lambda log: stall.wait(5.0) and 7)
    monkeypatch.setattr(trainer_handle, "READ_S", 0.02)
    async with World().link() as link:
        looking = asyncio.ensure_future(link._ask_view())
        _, view, log_bytes = await looking
        was_stalled = not stall.is_set()
        stall.set()
        assert (view, log_bytes, was_stalled) == (LOADED, 0, True)
    stall.set()


@pytest.mark.parametrize("turns", range(4))
async def test_one_that_is_closed_just_as_its_log_was_read_ends(monkeypatch, turns):
    """A cancellation in that moment was swallowed: its questions went on, and their end was waited for for ever."""
    async with World().link() as link:
        size = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(asyncio, "to_thread", lambda *args: _awaited(size))
        reading = asyncio.create_task(link._log_size())
        await asyncio.sleep(0.01)
        size.set_result(1)
        for _ in range(turns):
            await asyncio.sleep(0)
        had_ended = reading.done()
        reading.cancel()
        await asyncio.wait([reading])
        assert had_ended or reading.cancelled()


async def _awaited(future):
    return await future
