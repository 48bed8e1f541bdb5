"""Every call to an actor ends in a value or in an error of ours, however Ray says that there is no answer. One that is
asked periodically: no late answer replaces a newer one, no defect is kept from the owner."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError, TaskCancelledError

from actors.cluster.actor_calls import ActorAway, ActorProbe, answer
from actors.training import trainer as trainer_module
from actors.training.admission_gate import MonitorAway
from actors.training.trainer import ask_monitor
from launcher.base.errors import RunError, ServerError
from tests.support.fake_actors import Method, never


def raised_by_an_actor(cause):
    """As Ray raises it in the caller: an error of the cause's own kind too."""
    return RayTaskError("admit", "traceback", cause).as_instanceof_cause()


def ask(error):
    async def call():
        raise error

    return asyncio.run(answer(call(), within_s=5.0, of="the actor"))


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        OutOfMemoryError("killed by the memory monitor"),  # no RayActorError
        NodeDiedError("node"),
        TaskCancelledError(),
    ],
)
def test_whatever_ray_says_of_an_actor_that_is_gone_it_is_away(error):
    with pytest.raises(ActorAway, match="the actor is not there"):
        ask(error)


def test_an_error_of_ours_is_itself_and_another_a_defect():
    with pytest.raises(ServerError, match="it refused"):
        ask(raised_by_an_actor(ServerError("it refused")))
    with pytest.raises(RunError, match=r"the actor failed: KeyError\('x'\)"):
        ask(raised_by_an_actor(KeyError("x")))


def test_one_that_never_answers_is_away():
    with pytest.raises(ActorAway, match="did not answer within 0 s"):
        asyncio.run(answer(never(), within_s=0.0, of="the actor"))


class Monitor:
    admit = Method(lambda report: report)


MONITOR = Monitor()


def ask_gate(monkeypatch, *, found=MONITOR, error=None):
    def get_actor(name):
        if found is None:
            raise ValueError(name)
        return found

    def get(ref, timeout):
        raise error

    trainer_module._monitor.cache_clear()
    monkeypatch.setattr(trainer_module.ray, "get_actor", get_actor)
    monkeypatch.setattr(trainer_module.ray, "get", get)
    return ask_monitor("a batch")


def test_a_monitor_that_fails_at_a_batch_is_not_waited_for_as_one_that_is_away(monkeypatch):
    """It would fail again at each question, and the trainer wait for ever (a ValueError was once taken for no name)."""
    for cause in (ValueError("math domain error"), KeyError("x")):
        with pytest.raises(RunError, match="the HealthMonitor failed at the gate"):
            ask_gate(monkeypatch, error=raised_by_an_actor(cause))


def test_a_monitor_that_is_gone_is_away(monkeypatch):
    for error in (ActorDiedError(), OutOfMemoryError("killed")):
        with pytest.raises(MonitorAway):
            ask_gate(monkeypatch, error=error)
    with pytest.raises(MonitorAway):
        ask_gate(monkeypatch, found=None)


async def test_an_answer_that_comes_after_that_to_a_later_question_is_dropped():
    first, second = asyncio.Future(), asyncio.Future()
    questions, heard = [first, second], []
    probe = ActorProbe(lambda: questions.pop(0), heard=heard.append)
    asked = [asyncio.create_task(probe.refresh()) for _ in range(2)]
    await asyncio.sleep(0)
    assert probe.is_waiting
    assert not probe.is_fresh(1e9)
    second.set_result("new")
    first.set_result("old")
    await asyncio.gather(*asked)
    assert (heard, probe.is_waiting, probe.is_fresh(1e9)) == (["new"], False, True)


async def test_an_actor_that_does_not_answer_is_not_an_error_of_the_owner():
    answers, missed = [ActorAway("gone"), ActorAway("late"), "here"], []
    answers[1].__cause__ = TimeoutError()

    async def ask():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    probe = ActorProbe(ask, missed=lambda: missed.append((probe.error, probe.unanswered, probe.is_waiting)))
    for _ in range(3):
        await probe.refresh()
    assert missed == [("gone", 0, True), ("late", 1, True)]
    assert (probe.error, probe.unanswered, probe.is_waiting) == ("", 0, False)


async def test_a_defect_ends_the_questions_and_is_raised_to_the_owner():
    async def ask():
        raise KeyError("a defect")

    probe = ActorProbe(ask)
    probe.begin(lambda: 0.0)
    with pytest.raises(KeyError, match="a defect"):
        probe.tasks.check()
        for _ in range(5):
            await asyncio.sleep(0)
        try:
            probe.tasks.check()
        finally:
            await probe.close()


async def test_nothing_is_left_running_after_close():
    ended = []

    async def ask():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    probe = ActorProbe(ask)
    probe.begin(lambda: 0.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await probe.close()
    assert ended == [True]
