"""Known good and bad completions of the user test any reward, and a noisy judge is not called broken."""

import asyncio
import json
import random
import textwrap

import pytest

from actors.reward.canaries import CanaryRounds, ErrorRates, pick, score_canaries
from actors.reward.data_check import check_data
from actors.reward.known_completions import learn_known, read_known
from actors.reward.reward_pool import RewardPool, Score
from launcher.base.errors import DataError, RewardImportError
from launcher.config.compose import compose
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import CanaryRound, judge_canaries

SETTINGS = RewardHealthConfig()
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


class World:
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
        return compose(
            [
                *("conf=arithmetic_cpu", f"train_dataset.path={self.folder / 'd.jsonl'}", "valid_dataset=null"),
                *("evaluator.freq_epochs=null", "evaluator.freq_steps=null", "train_dataset.answer_key=null"),
                *("reward.fn=polite_rewards:score", f"reward.canaries={self.folder / 'known.jsonl'}"),
            ]
        )

    def learn(self, scorer):
        kept = self.folder / "canaries.json"
        return asyncio.run(learn_known(read_known(self.config), scorer, ErrorRates(), keep_in=kept))


@pytest.fixture
def world(tmp_path, monkeypatch):
    (tmp_path / "polite_rewards.py").write_text(textwrap.dedent(JUDGE.format(mode=str(tmp_path / "mode"))))
    monkeypatch.syspath_prepend(tmp_path)
    return World(tmp_path)


@pytest.fixture
def pool(world):
    with RewardPool(world.config.reward) as pool:
        yield pool


def verdict(canaries, scorer, rates=None, rounds=1):
    scored = [CanaryRound(step=i, scores=asyncio.run(score_canaries(canaries, scorer, rates))) for i in range(rounds)]
    return judge_canaries(scored, SETTINGS)


def test_a_judge_that_never_says_the_same_twice_is_tested_with_them(world, pool):
    canaries = world.learn(pool)
    assert [one.name.split(" (")[0] for one in canaries[:2]] == [
        "good completion known.jsonl:1",
        "bad completion known.jsonl:2",
    ]
    assert not verdict(canaries, pool, rounds=5).is_broken
    for mode in ("zero", "ten", "turned"):
        world.mode.write_text(mode)
        assert verdict(canaries, pool).is_broken, mode
    world.mode.write_text("sound")
    assert not verdict(canaries, pool).is_broken


@pytest.mark.slow
def test_an_attempt_that_begins_with_a_broken_judge_knows_what_was_right(world, pool):
    first = world.learn(pool)
    world.mode.write_text("zero")
    again = world.learn(pool)
    assert again == first
    assert verdict(again, pool).is_broken
    with pytest.raises(RewardImportError, match="doesn't tell good from bad: good completion known"):
        check_data(world.config)
    world.write(KNOWN[:4])  # another file: what was kept is of other lines
    world.mode.write_text("sound")
    assert len(world.learn(pool)) == 4


class ErringJudge:
    """Turns a share of its scores round."""

    def __init__(self, seed, errs):
        self.errs, self.rng = errs, random.Random(seed)

    async def score(self, completions, prompt):
        return [Score(value=float(("please" in t) != (self.rng.random() < self.errs))) for t in completions]


def first_accused(canaries, judge, rates, steps):
    rounds = []
    for step in range(steps):
        chosen = pick(canaries, 6, step)
        rounds = [*rounds, CanaryRound(step=step, scores=asyncio.run(score_canaries(chosen, judge, rates)))][-20:]
        if judge_canaries(rounds, SETTINGS).is_broken:
            return step
    return None


@pytest.mark.slow
@pytest.mark.parametrize("errs", [0.01, 0.001])
def test_a_judge_that_errs_by_chance_is_not_called_broken_and_one_that_breaks_is(world, errs):
    known = read_known(world.config)
    for seed in range(10):
        judge, rates = ErringJudge(seed, errs), ErrorRates()
        canaries = asyncio.run(learn_known(known, judge, rates))
        assert first_accused(canaries, judge, rates, 200) is None, seed
        judge.errs = 1.0
        assert first_accused(canaries, judge, rates, 1) == 0


def test_the_rates_outlive_the_trainer(tmp_path):
    rates = ErrorRates(tmp_path / "rates.json")
    rates.add("a", wrong=10, scored=50)
    rates.add("b", wrong=0, scored=50)
    rates.add("a", wrong=1, scored=9)
    again = ErrorRates(tmp_path / "rates.json")
    assert again.of("a") == rates.of("a") == 12 / 159
    assert again.of("b") == rates.of("b") == 1 / 150
    assert again.of("new") == 1 / 100


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
def test_a_file_that_does_not_fit_is_refused_with_its_line(world, lines, said):
    world.write(lines)
    with pytest.raises(DataError, match=said):
        read_known(world.config)


def test_a_file_that_is_not_there_is_refused_before_anything_is_scored(world):
    (world.folder / "known.jsonl").unlink()
    with pytest.raises(DataError, match=r"reward.canaries='.*known.jsonl' is no file"):
        check_data(world.config)


def test_a_few_are_scored_at_each_step(world):
    judge, rates = ErringJudge(0, 0.0), ErrorRates()
    canaries = asyncio.run(learn_known(read_known(world.config), judge, rates))
    rounds = CanaryRounds(canaries, judge, count=2, submit=asyncio.run, rates=rates)
    names = [score.name.split(" (")[0] for step in range(3) for score in rounds.begin(step)]
    assert len(set(names)) == 6
    assert {name.split()[0] for name in names[:2]} == {"good", "bad"}
