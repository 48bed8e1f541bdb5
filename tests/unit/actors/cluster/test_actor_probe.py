"""An actor is asked periodically: no late answer replaces a newer one, no defect is kept from the owner."""

import asyncio

import pytest

from actors.cluster.actor_calls import ActorAway
from actors.cluster.actor_probe import ActorProbe


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
