"""An actor is asked periodically: no late answer replaces a newer one, no defect is kept from the owner."""

import asyncio

import pytest

from actors.cluster.actor_calls import ActorAway
from actors.cluster.actor_probe import ActorProbe


def test_an_answer_that_comes_after_that_to_a_later_question_is_dropped():
    async def scenario():
        first, second = asyncio.Future(), asyncio.Future()
        questions, heard = [first, second], []
        probe = ActorProbe(lambda: questions.pop(0), heard=heard.append)
        asked = [asyncio.create_task(probe.refresh()) for _ in range(2)]
        await asyncio.sleep(0)
        assert probe.is_waiting and not probe.is_fresh(1e9)
        second.set_result("new")
        first.set_result("old")
        await asyncio.gather(*asked)
        return heard, probe.is_waiting, probe.is_fresh(1e9)

    assert asyncio.run(scenario()) == (["new"], False, True)


def test_an_actor_that_does_not_answer_is_not_an_error_of_the_owner():
    async def scenario():
        answers, missed = [ActorAway("gone"), "here"], []

        async def ask():
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        probe = ActorProbe(ask, missed=missed.append)
        await probe.refresh()
        away = probe.error, probe.is_waiting
        await probe.refresh()
        return away, probe.error, probe.is_waiting, len(missed)

    assert asyncio.run(scenario()) == (("gone", True), "", False, 1)


def test_a_defect_ends_the_questions_and_is_raised_to_the_owner():
    async def scenario():
        async def ask():
            raise KeyError("a defect")

        probe = ActorProbe(ask)
        probe.begin(lambda: 0.0)
        probe.tasks.check()
        for _ in range(5):
            await asyncio.sleep(0)
        try:
            probe.tasks.check()
        finally:
            await probe.close()

    with pytest.raises(KeyError, match="a defect"):
        asyncio.run(scenario())


def test_nothing_is_left_running_after_close():
    async def scenario():
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
        return ended

    assert asyncio.run(scenario()) == [True]
