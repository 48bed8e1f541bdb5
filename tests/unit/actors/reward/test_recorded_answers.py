"""The run's own known answers: kept from healthy steps, scored and answered again, known to the next attempt."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest

from actors.reward import recorded_answers
from actors.reward.recorded_answers import LEAST, RecordedAnswers
from actors.reward.reward_pool import Score
from launcher.base.errors import RewardError
from tests.support.replay import Replay, prompts
from tests.support.worlds.policy import OneTake, spoiled

IDS = prompts(4)


class Scorer:
    def __init__(self):
        self.value = 1.0
        self.quick = None

    async def score(self, completions, prompt, *, whole_or_none=False, made=(), group=()):
        if isinstance(self.value, Exception):
            raise self.value
        if len(completions) == 1 and self.quick is not None:
            self.quick -= 1
            if self.quick < 0:
                await asyncio.Event().wait()
        return [Score(value=self.value) for _ in completions]


def at_once(work):
    done = Future()
    try:
        done.set_result(asyncio.run(work))
    except RewardError as error:
        done.set_exception(error)
    return done


def batch(version=7):
    return Replay(prompts(4), 2).collect(OneTake(), want=4, weight_version=version)


@pytest.fixture
def made(tmp_path):
    scorer, asked = Scorer(), []

    def replay(queue, want, version):
        asked.append((sorted(queue.take_prompts(want)), version))
        return batch(version)

    def record(count=48):
        return RecordedAnswers(
            IDS, scorer, count=count, keep_in=tmp_path / "recorded.json", submit=at_once, replay=replay
        )

    return record, scorer, asked


def noted(record, steps=range(6)):
    for step in steps:
        record.note(batch(), step)
    return record


def test_what_was_noted_is_scored_and_answered_again(made):
    make, scorer, asked = made
    record = noted(make())
    assert record.is_enough
    rescored, replayed = record.check(100, 9)
    assert (rescored.expected, rescored.got) == (1.0, 1.0)
    assert asked == [(sorted(IDS), 9)]
    assert replayed.name == "4 prompts of healthy steps"
    scorer.value = 0.0
    rescored, replayed = record.check(100, 9)
    assert rescored.is_low, "what new answers earn shows nothing then"
    assert replayed is None, "what new answers earn shows nothing then"
    assert len(asked) == 1, "what new answers earn shows nothing then"
    scorer.value = RewardError("no process")
    assert (record.rescore().got, record.rescore().error) == (None, "no process")


def test_only_steps_from_before_the_onset_are_asked_and_too_few_say_nothing(made):
    make, _, asked = made
    record = noted(make())
    assert record.check(1, 9) == (None, None)
    assert asked == []
    assert record.rescore() is None, "the same as at the last check"


def test_nobody_waits_for_a_function_that_hangs_and_a_slow_one_is_not_called_broken(made, monkeypatch):
    make, scorer, asked = made
    record = noted(make())
    monkeypatch.setattr(recorded_answers, "RESCORED_WITHIN_S", 0.05)
    scorer.quick = LEAST
    some = record.rescore()
    assert (some.name, some.got) == ("8 completions of healthy steps", 1.0)
    scorer.quick = LEAST - 1
    rescored, replayed = record.check(100, 9)
    assert rescored is None
    assert replayed is not None
    assert len(asked) == 1
    scorer.quick = 0
    none = record.rescore()
    assert (none.got, none.error) == (None, recorded_answers.LATE)


def test_the_next_attempt_knows_them_and_a_damaged_file_is_no_error(made, tmp_path):
    make, _, _ = made
    noted(make())
    assert make().is_enough
    (tmp_path / "recorded.json").write_text('[{"step": 1}]')
    assert not make().is_enough


def test_of_steps_that_were_undone_nothing_is_asked_when_the_run_is_past_them_again(made):
    make, _, _ = made
    record = noted(make(), range(11))  # the last one is being scored
    record.check(8, 9)
    assert {one.step for one in record._known} == set(range(10)), "a restore may still be undone itself"
    noted(record, range(6, 9))
    assert [one.step for one in record._known].count(8) == 0
    assert {one.step for one in record._known} == set(range(8))


def test_the_count_is_kept_with_some_old_ones_among_them_and_0_keeps_none(made):
    make, _, _ = made
    record = noted(make(count=12), range(0, 400, 5))
    steps = sorted(one.step for one in record._known)
    assert len(steps) == 12
    assert steps[0] < 380 <= steps[-1]
    assert not noted(make(count=0)).is_enough


def test_what_was_left_out_is_kept_only_where_weights_that_made_it_were_compared_at_the_gate(made):
    """The log-probs of flat groups are not measured: those of a server that made nothing else could be anybody's."""
    make, _, _ = made
    whole = batch()
    other = spoiled(replace(whole, groups=whole.groups[2:3]), server="http://other").groups[0]
    record = make()
    for step in range(6):
        record.note(replace(whole, groups=whole.groups[:2], filtered=(other, whole.groups[3])), step)
    record._take_scored()
    assert {one.prompt_id for one in record._known} == {g.prompt.id for g in (*whole.groups[:2], whole.groups[3])}


def test_what_was_scored_by_a_function_that_had_just_broken_is_not_kept(made):
    """A reward of 1e308 was, and from then on a sound function was called broken for good."""
    make, scorer, _ = made
    record = noted(make())
    scorer.value = 1.2e308
    record.note(batch(), 6)  # admitted just before; it is scored just after
    record.distrust()
    scorer.value = 1.0
    record.note(batch(), 7)
    rescored, _ = record.check(100, 9)
    assert (rescored.expected, rescored.got) == (1.0, 1.0)
    scorer.value = 1.2e308
    record.note(batch(), 8)  # a low batch after it: it is asked about before it is rejected
    record.check(100, 9)
    record.distrust()
    scorer.value = 1.0
    rescored, _ = record.check(100, 9)
    assert (rescored.expected, rescored.got) == (1.0, 1.0)


def test_what_could_not_be_scored_is_not_kept(made):
    make, scorer, _ = made
    scorer.value = None
    assert len(noted(make())._known) == 0
    scorer.value = RewardError("gone")
    assert len(noted(make())._known) < LEAST
