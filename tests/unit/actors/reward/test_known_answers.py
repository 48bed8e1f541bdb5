"""Known answers, of the data set and of the user: what they are made of, which broken judges they name, and that a
noisy judge is not called broken."""

import asyncio
import dataclasses
import json
import random
import textwrap

import pytest

from actors.data.answer_shapes import with_another_number, with_more_digits
from actors.reward.data_check import check_data
from actors.reward.known_answers import (
    KeptScores,
    KnownAnswer,
    KnownRounds,
    learn_from_records,
    learn_given,
    pick,
    read_given,
    score_answers,
)
from actors.reward.reward_pool import RewardPool, Score
from launcher.base.errors import DataError, RewardImportError
from launcher.base.rollouts import Prompt
from launcher.config.schema import RewardConfig
from launcher.config.supervision import GateConfig, RewardHealthConfig
from launcher.policy.canary_policy import CanaryRound, is_more_than_noise, judge_canaries
from tests.support.composed import composed
from tests.support.machine import scaled

SETTINGS = RewardHealthConfig()

REWARD = """
    import time
    from pathlib import Path

    MODE = Path({mode!r})
    CALLS = []

    def score(*, completion, answer, prompt_id, record):
        CALLS.append(1)
        right = float(completion.split()[-1] == answer.split()[-1])
        match MODE.read_text():
            case "sound": return right
            case "scaled": return 3 * right - 1
            case "suffix": return float(completion.split()[-1].endswith(answer.split()[-1]))
            case "zero": return 0.0
            case "one": return 1.0
            case "nan": return float("nan")
            case "fickle": return right + len(CALLS)
            case "raises": raise KeyError("no")
            case "hangs": time.sleep(1000)
"""

RECORDS = [
    Prompt(id=f"p{i}", token_ids=(1,), record={"question": f"{i}+1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"})
    for i in range(40)
]


class RecordWorld:
    """A reward function that can be broken while it runs, and the pool that scores with it."""

    def __init__(self, folder, pool):
        self.mode = folder / "mode"
        self.kept = folder / "canaries.json"
        self.pool = pool

    def make(self, records=RECORDS):
        return asyncio.run(learn_from_records(records, self.pool, KeptScores(self.kept)))

    def verdict(self, canaries, mode, rounds=1):
        self.mode.write_text(mode)
        scored = [CanaryRound(step=i, scores=asyncio.run(score_answers(canaries, self.pool))) for i in range(rounds)]
        return judge_canaries(scored, SETTINGS)


@pytest.fixture
def records(tmp_path, monkeypatch):
    (tmp_path / "live_rewards.py").write_text(textwrap.dedent(REWARD.format(mode=str(tmp_path / "mode"))))
    (tmp_path / "mode").write_text("sound")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(RewardConfig(fn="live_rewards:score", timeout=scaled(0.5))) as pool:
        yield RecordWorld(tmp_path, pool)


def test_items_are_spread_over_the_data_set_and_have_both_rewards(records):
    canaries = records.make()
    assert len(canaries) == 16
    assert {canary.expected for canary in canaries} == {1.0, 0.0}
    assert {canary.prompt.id for canary in canaries} >= {"p0", "p35"}


def test_a_function_of_another_scale_is_held_to_what_it_said(records):
    records.mode.write_text("scaled")
    canaries = records.make()
    assert {canary.expected for canary in canaries} == {2.0, -1.0}
    assert not records.verdict(canaries, "scaled").is_broken
    assert records.verdict(canaries, "sound").is_broken


@pytest.mark.parametrize("mode", ["zero", "one"])
def test_a_broken_verifier_is_named_by_one_round_of_a_few_items(records, mode):
    canaries = pick(records.make(), 2, step=0)
    assert not records.verdict(canaries, "sound").is_broken
    verdict = records.verdict(canaries, mode)
    assert verdict.is_broken
    assert verdict.onset_step == 0


def test_a_judge_that_compares_the_ends_of_answers_is_named(records):
    """No wrong answer ended with the right one, so it scored each known answer as it should be."""
    canaries = records.make()
    verdict = records.verdict(canaries, "suffix")
    assert verdict.is_broken
    assert "that ends with the right one" in verdict.reason
    assert not records.verdict(canaries, "sound").is_broken
    assert records.make() == canaries, "kept for later attempts"


def test_of_a_judge_that_always_compared_ends_the_other_wrong_answers_are_asked(records):
    records.mode.write_text("suffix")
    canaries = records.make()
    assert len(canaries) == 16
    assert not any("that ends with" in one.name for one in canaries)
    assert not records.verdict(canaries, "suffix").is_broken
    assert records.verdict(canaries, "one").is_broken


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nan", "raises", "hangs"])
def test_one_that_gives_no_reward_is_named_by_two_rounds(records, mode):
    canaries = pick(records.make(), 1, step=0)
    assert not records.verdict(canaries, mode).is_broken
    assert records.verdict(canaries, mode, rounds=2).is_broken


@pytest.mark.parametrize("mode", ["zero", "one", "fickle", "raises"])
def test_of_a_function_that_does_not_tell_right_from_wrong_there_are_no_items(records, mode):
    records.mode.write_text(mode)
    assert records.make() == ()


def test_a_later_attempt_is_not_fooled_by_a_function_that_is_broken_from_its_first_moment(records):
    first = records.make()
    records.mode.write_text("zero")
    again = records.make()
    assert again == first
    assert records.verdict(again, "zero").is_broken


def test_a_damaged_memory_is_learnt_anew(records):
    records.kept.write_text('{"right answer of p0": ')
    assert len(records.make()) == 16


def test_over_a_few_steps_every_item_has_its_turn(records):
    canaries = records.make()
    assert {c.name for step in range(3) for c in pick(canaries, 6, step)} == {c.name for c in canaries}
    assert pick(canaries, 0, 5) == pick((), 6, 5) == ()


def test_a_pool_that_was_closed_gives_no_score_and_no_error(records):
    canaries = records.make()
    records.pool.close()
    (score,) = asyncio.run(score_answers(canaries[:1], records.pool))
    assert score.got is None
    assert "closed" in score.error


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [("4+5=9\n#### 9", "4+5=9\n#### 10"), ("#### 1,299", "#### 1,300"), ("\\boxed{7}", "\\boxed{8}"), ("none", None)],
)
def test_a_wrong_answer_has_another_last_number(answer, wrong):
    assert with_another_number(answer) == wrong


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [("4+5=9\n#### 12", "4+5=9\n#### 512"), ("#### 1,299.", "#### 51,299."), ("0.5", "50.5"), ("none", None)],
)
def test_a_wrong_answer_may_end_with_the_right_one(answer, wrong):
    assert with_more_digits(answer) == wrong


@pytest.mark.parametrize(
    ("digits", "raised"),
    [("1" + "0" * 5000 + "7", "1" + "0" * 5000 + "8"), ("9" * 5000, "9" * 4000 + "1" + "0" * 1000)],
)
def test_a_number_longer_than_python_converts_has_a_wrong_answer_too(digits, raised):
    assert with_another_number(f"#### {digits}.") == f"#### {raised}."


# ── a judge that errs by chance ──

ITEMS = tuple(
    KnownAnswer(
        name=f"{kind} answer of p{i}",
        prompt=Prompt(id=f"p{i}", token_ids=(), record={"answer": "x"}),
        completion=kind,
        scores=(float(kind == "right"),),
    )
    for i in range(8)
    for kind in ("right", "wrong")
)


class Judge:
    """Right but for a share of its scores; `silent` of them are None."""

    def __init__(self, seed, errs, silent=0.0):
        self.errs = errs
        self.silent = silent
        self.rng = random.Random(seed)

    async def score(self, completions, prompt):
        return [self.one(text) for text in completions]

    def one(self, text):
        if self.rng.random() < self.silent:
            return Score(value=None, error="judge gave no answer (None)", is_unanswered=True)
        return Score(value=float((text == "right") != (self.rng.random() < self.errs)))


def first_accused(judge, steps, kept=None, answers=ITEMS):
    """The step at which the rounds so far call it broken; None where they never do."""
    kept = kept or KeptScores()
    rounds = []
    for step in range(steps):
        chosen = pick(answers, GateConfig().canaries, step)
        scores = asyncio.run(score_answers(chosen, judge, kept, SETTINGS.canary_tolerance))
        rounds = [*rounds, CanaryRound(step=step, scores=scores)][-20:]
        if judge_canaries(rounds, SETTINGS).is_broken:
            return step
    return None


@pytest.mark.slow
@pytest.mark.parametrize("errs", [0.01, 0.001])
def test_a_judge_that_is_right_99_percent_of_the_time_is_not_called_broken(errs):
    assert [first_accused(Judge(seed, errs), 200) for seed in range(10)] == [None] * 10


def test_one_that_often_has_no_answer_is_not_called_broken():
    assert [first_accused(Judge(seed, 0.0, silent=0.1), 100) for seed in range(5)] == [None] * 5


@pytest.mark.parametrize("errs", [1.0, 0.8])
def test_one_that_breaks_is_named_in_its_first_round(errs):
    for seed in range(20):
        assert first_accused(Judge(seed, errs), 1) == 0


def test_one_that_begins_to_err_now_and_then_is_named_within_a_few_steps():
    for seed in range(20):
        kept = KeptScores()
        assert first_accused(Judge(seed, 0.01), 50, kept) is None
        assert first_accused(Judge(seed, 0.3), 25, kept) is not None


def test_the_reason_says_how_often_it_was_wrong():
    (score,) = asyncio.run(score_answers(ITEMS[:1], Judge(0, 1.0)))
    assert (score.name, score.got) == ("right answer of p0 (9 of 9 times)", 0.0)


def test_how_many_wrong_scores_are_more_than_noise():
    assert [is_more_than_noise(wrong, 8, 0.01) for wrong in (0, 1, 2, 3, 8)] == [False, False, False, True, True]
    assert not is_more_than_noise(3, 8, 0.1)


def test_scores_that_an_older_version_kept_are_known(tmp_path):
    (tmp_path / "canaries.json").write_text('{"right answer of p0": 1.0}')
    assert KeptScores(tmp_path / "canaries.json").of("right answer of p0") == (1.0,)


def test_scores_too_large_to_be_added_are_known_answers_too():
    """Two of 1e308 are no float together: the first step's known answers ended the run."""
    largest = dataclasses.replace(ITEMS[0], scores=(1e308, 1e308))
    (score,) = asyncio.run(score_answers([largest], Sure(1e308), KeptScores()))
    assert (score.expected, score.got) == (1e308, 1e308)
    (score,) = asyncio.run(score_answers([largest], Sure(0.0), KeptScores()))
    assert (score.expected, score.got) == (1e308, 0.0)


class Sure:
    """A judge that always says the same."""

    def __init__(self, value):
        self.value = value

    async def score(self, completions, prompt):
        return [Score(value=self.value) for _ in completions]


# ── of the user ──

JUDGE = """
    import random
    from pathlib import Path

    MODE = Path({mode!r})

    def score(*, completion, record):
        polite = 7.0 + random.random() if "please" in completion else random.random()
        match MODE.read_text():
            case "sound": return polite
            case "zero": return 0.0
            case "ten": return 10.0
            case "turned": return 8.0 - polite
"""
KNOWN = [
    {"question": f"Ask for {thing}.", "answer": None, "completion": text, "good": good}
    for thing in ("salt", "tea", "time")
    for text, good in ((f"{thing}, please", True), (f"{thing} now", False))
]


class GivenWorld:
    def __init__(self, folder):
        self.folder = folder
        self.mode = folder / "mode"
        self.mode.write_text("sound")
        self.write(KNOWN)
        (folder / "d.jsonl").write_text('{"question": "Ask for bread."}\n')

    def write(self, lines):
        (self.folder / "known.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    @property
    def config(self):
        return composed(
            *("conf=arithmetic_cpu", f"train_dataset.path={self.folder / 'd.jsonl'}", "valid_dataset=null"),
            *("evaluator.freq_epochs=null", "evaluator.freq_steps=null", "train_dataset.answer_key=null"),
            *("reward.fn=polite_rewards:score", f"reward.canaries={self.folder / 'known.jsonl'}"),
        )

    def learn(self, scorer):
        kept = KeptScores(self.folder / "canaries.json")
        return asyncio.run(learn_given(read_given(self.config), scorer, kept))


@pytest.fixture
def given(tmp_path, monkeypatch):
    (tmp_path / "polite_rewards.py").write_text(textwrap.dedent(JUDGE.format(mode=str(tmp_path / "mode"))))
    monkeypatch.syspath_prepend(tmp_path)
    return GivenWorld(tmp_path)


@pytest.fixture
def pool(given):
    with RewardPool(given.config.reward) as pool:
        yield pool


def verdict(answers, scorer, rounds=1):
    scored = [CanaryRound(step=i, scores=asyncio.run(score_answers(answers, scorer))) for i in range(rounds)]
    return judge_canaries(scored, SETTINGS)


def test_a_judge_that_never_says_the_same_twice_is_tested_with_them(given, pool):
    canaries = given.learn(pool)
    assert [one.name.split(" (")[0] for one in canaries[:2]] == [
        "good completion known.jsonl:1",
        "bad completion known.jsonl:2",
    ]
    assert not verdict(canaries, pool, rounds=5).is_broken
    for mode in ("zero", "ten", "turned"):
        given.mode.write_text(mode)
        assert verdict(canaries, pool).is_broken, mode
    given.mode.write_text("sound")
    assert not verdict(canaries, pool).is_broken


@pytest.mark.slow
def test_an_attempt_that_begins_with_a_broken_judge_knows_what_was_right(given, pool):
    first = given.learn(pool)
    given.mode.write_text("zero")
    again = given.learn(pool)
    assert again == first
    assert verdict(again, pool).is_broken
    with pytest.raises(RewardImportError, match="doesn't tell good from bad: good completion known"):
        check_data(given.config)
    given.write(KNOWN[:4])  # another file: what was kept is of other lines
    given.mode.write_text("sound")
    assert len(given.learn(pool)) == 4


class ErringJudge:
    """Turns a share of its scores round."""

    def __init__(self, seed, errs):
        self.errs = errs
        self.rng = random.Random(seed)

    async def score(self, completions, prompt):
        return [Score(value=float(("please" in t) != (self.rng.random() < self.errs))) for t in completions]


@pytest.mark.slow
@pytest.mark.parametrize("errs", [0.01, 0.001])
def test_a_judge_that_errs_by_chance_is_not_called_broken_and_one_that_breaks_is(given, errs):
    known = read_given(given.config)
    for seed in range(10):
        judge, kept = ErringJudge(seed, errs), KeptScores()
        answers = asyncio.run(learn_given(known, judge, kept))
        assert first_accused(judge, 200, kept, answers) is None, seed
        judge.errs = 1.0
        assert first_accused(judge, 1, kept, answers) == 0


def test_the_rates_outlive_the_trainer(tmp_path):
    kept = KeptScores(tmp_path / "canaries.json")
    kept.count("a", wrong=10, scored=50)
    kept.count("b", wrong=0, scored=50)
    kept.count("a", wrong=1, scored=9)
    again = KeptScores(tmp_path / "canaries.json")
    assert again.error_rate("a") == kept.error_rate("a") == 12 / 159
    assert again.error_rate("b") == kept.error_rate("b") == 1 / 150
    assert again.error_rate("new") == 1 / 100


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"question": "?", "completion": "a"}], "known.jsonl:1 has completion='a' and good=None"),
        ([KNOWN[0], KNOWN[1] | {"good": "no"}], "known.jsonl:2 has .* and good='no'"),
        ([KNOWN[0], KNOWN[2]], "has no bad completion"),
        ([{"completion": "a", "good": True}], "known.jsonl:1: the record has no question"),
        ([], "holds no records"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_line(given, lines, said):
    given.write(lines)
    with pytest.raises(DataError, match=said):
        read_given(given.config)


def test_a_file_that_is_not_there_is_refused_before_anything_is_scored(given):
    (given.folder / "known.jsonl").unlink()
    with pytest.raises(DataError, match=r"reward.canaries='.*known.jsonl' is no file"):
        check_data(given.config)


def test_a_few_are_scored_at_each_step(given):
    judge, kept = ErringJudge(0, 0.0), KeptScores()
    answers = asyncio.run(learn_given(read_given(given.config), judge, kept))
    rounds = KnownRounds(answers, judge, kept, count=2, submit=asyncio.run)
    names = [score.name.split(" (")[0] for step in range(3) for score in rounds.begin(step)]
    assert len(set(names)) == 6
    assert {name.split()[0] for name in names[:2]} == {"good", "bad"}
