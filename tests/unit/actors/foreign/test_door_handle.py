"""The door as the Coordinator sees it, where it does not answer: ended, and for how long it has been silent."""

import asyncio
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from actors.cluster import actor_calls
from actors.foreign import fleet
from actors.foreign.fleet import DoorHandle
from actors.supervision import trainer_handle
from launcher.base.messages import TrainerView
from launcher.config.supervision import HealthConfig
from tests.support.fake_actors import FakeActor, never
from tests.support.worlds.door import until


class Silent:
    """A door that `hangs`, or else fails at once; each question is asked at the next of `times`, in seconds."""

    def __init__(self, monkeypatch, tmp_path, *, times, hangs=True):
        self.killed = []
        self.died = []
        self.answers = False
        self.hangs = hangs
        clock = itertools.chain([0.0], times)
        ray = SimpleNamespace(kill=lambda actor, no_restart: self.killed.append(no_restart))
        monkeypatch.setattr(trainer_handle, "ANSWER_S", 0.001)
        monkeypatch.setattr(fleet, "ray", ray)
        monkeypatch.setattr(fleet, "Silence", partial(actor_calls.Silence, lambda: next(clock)))
        self.handle = DoorHandle(
            FakeActor(view=self.view),
            ended=self.died.append,
            changed=asyncio.Event(),
            health=HealthConfig(supervisor_silence_s=2 * fleet.ANSWER_S),
            log=tmp_path / "trainer.log",
        )

    def view(self):
        if self.answers:
            return TrainerView(pid=1, node="another")
        if self.hangs:
            return never()
        raise RayActorError(error_msg="it is being restarted")

    async def ask(self, times=1):
        for _ in range(times):
            await self.handle.probe.refresh()
        return self.handle.silence.seconds


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "is restarted in vain"])
async def test_a_door_that_never_answers_is_silent_for_as_long_as_it_is_asked(monkeypatch, tmp_path, hangs):
    """It was ended each time, for ever, or not even that; the command's requests waited without an end."""
    door = Silent(monkeypatch, tmp_path, times=[1.0, 5.0, 9.0, 13.0, 14.0], hangs=hangs)
    door.answers = True
    assert await door.ask() == 0.0
    door.answers = False
    assert await door.ask(2) == 8.0
    assert await door.ask() == 12.0
    door.answers = True
    assert await door.ask() == 0.0, "it counts from its last answer"
    await door.handle.close()
    assert door.killed == [False] * hangs, "Ray starts it again"
    assert door.died == ["it answers nobody: it is ended"] * hangs


async def test_one_that_never_answered_is_ended_too_only_later(monkeypatch, tmp_path):
    """A Coordinator that began beside a hung door never ended it."""
    door = Silent(monkeypatch, tmp_path, times=map(float, range(1, 10)))
    await door.ask(7)
    assert door.died == [], "it may be starting"
    await door.ask()
    assert door.died == ["it answers nobody: it is ended"]
    await until(lambda: door.killed)
    await door.handle.close()
    assert door.killed == [False]


async def test_a_pause_of_the_coordinator_is_no_silence_of_the_door(monkeypatch, tmp_path):
    door = Silent(monkeypatch, tmp_path, times=[3600.0, 3601.0])
    assert await door.ask(2) == pytest.approx(actor_calls.LONGEST_TURN_S + 1.0)
    await door.handle.close()
