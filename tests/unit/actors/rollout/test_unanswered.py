"""Completions for which the reward function has no answer are generated anew, so often and no more, and never 0."""

import pytest

from actors.reward.reward_pool import Score
from launcher.base.errors import RewardError
from tests.programs import stand_in_server
from tests.support.replay import prompts
from tests.support.worlds.rollout import QUICK, collect, engine, queue_of


class AnswersLater:
    """Has no answer for some of the first completions of a prompt, and notes what it is given."""

    def __init__(self, silent, times):
        self.silent = silent
        self.left = times
        self.asked = []

    async def score(self, completions, prompt, *, whole_or_none=False, made=(), group=()):
        self.asked.append((len(completions), len(made), len(group)))
        nothing = Score(value=None, error="judge gave no answer (None)", is_unanswered=True)
        silent = self.silent if self.left > 0 else 0
        self.left -= 1
        return [nothing if place < silent else Score(value=1.0, parts={"a": 1.0}) for place in range(len(completions))]


async def collected(scorer):
    items = prompts(1)
    with stand_in_server.running("--weight-version", "0") as url:
        async with engine([url], scorer=scorer) as (rollouts, _):
            return await collect(rollouts, queue_of(items), items, 1)


async def test_of_a_group_only_what_has_no_answer_is_generated_anew():
    scorer = AnswersLater(silent=3, times=1)
    batch = await collected(scorer)
    assert scorer.asked == [(8, 8, 0), (3, 3, 8)]
    assert (batch.unanswered, batch.failed) == (3, 0)
    assert [(one.reward, one.parts) for one in batch.rollouts] == [(1.0, {"a": 1.0})] * 8


class Late(AnswersLater):
    """Takes too long for the first group, in place of an answer of None."""

    async def score(self, completions, prompt, **more):
        late = Score(value=None, error="took longer than reward.timeout=1 s", is_late=True)
        return [late if one.is_unanswered else one for one in await super().score(completions, prompt, **more)]


async def test_what_is_scored_too_late_is_counted_and_named(caplog):
    batch = await collected(Late(silent=2, times=1))
    assert (batch.late, batch.unanswered, batch.failed) == (2, 0, 1)
    (line,) = [one.message for one in caplog.records if "reward.no_score" in one.message]
    assert "completions=2 reason='took longer than reward.timeout=1 s'" in line


async def test_a_function_that_never_answers_ends_the_run_and_not_with_0():
    scorer = AnswersLater(silent=1, times=1000)
    with pytest.raises(RewardError, match=r"judge gave no answer \(None\)"):
        await collected(scorer)
    assert len(scorer.asked) == QUICK.prompt_attempts**2
