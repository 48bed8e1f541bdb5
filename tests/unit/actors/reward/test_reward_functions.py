"""Several functions with weights, parts, async ones, None, and what a function may ask for, in real processes."""

import asyncio
import textwrap
import time
from types import SimpleNamespace

import pytest

from actors.reward.reward_pool import RewardPool, Score
from launcher.base.rollouts import Prompt
from launcher.config.compose import REPOSITORY
from launcher.config.data import RewardConfig
from tests.support.machine import scaled

"""Of a function that never answers; the others beside it answer sooner, on a busy machine too."""
PROMPT = Prompt(id="p1", token_ids=(1,), record={"problem": "6*7?", "target": 42}, answer_key="target")
REWARDS = """
    import asyncio, time

    def right(completion, answer):
        return float(completion == str(answer))

    def brief(*, completion):
        return -len(completion)

    def parts(completion):
        return {"form": 1.0, "style": len(completion)}

    def silent(completion):
        return None

    def half_silent(completion):
        return {"form": 1.0, "style": None}

    def scalars(completion):
        import numpy
        return {"equal": numpy.array(["a"])[0] == completion, "all": numpy.array(2.5)}

    def arrays(completion):
        import numpy
        return numpy.array([1.0])

    def huge():
        return 1e308

    def asks(token_ids, finish_reason, group, record):
        return len(token_ids) + 10 * (finish_reason == "length") + 100 * len(group) + 1000 * len(record)

    async def judge(completion):
        if completion == "fail":
            raise KeyError("spoon")
        if completion == "block":
            time.sleep(1000)
        await asyncio.sleep(1000 if completion == "hang" else 0.3)
        return {"judge": 1.0}

    CALLS = []

    async def on_one_loop(completion):
        CALLS.append(asyncio.get_running_loop())
        return float(len(set(CALLS)))
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "part_rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.syspath_prepend(tmp_path)
    pools = []

    def make(*names, **changes):
        fn = "+".join(f"part_rewards:{name}" for name in names)
        pools.append(RewardPool(RewardConfig(**{"fn": fn, "timeout": scaled(30.0)} | changes)))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def score(pool, completions, **more):
    return asyncio.run(asyncio.wait_for(pool.score(completions, PROMPT, **more), scaled(120)))


def test_the_answer_has_the_type_that_the_data_set_gives_it(pool):
    assert score(pool("right"), ["42", "41"]) == [Score(value=1.0), Score(value=0.0)]


def test_several_functions_are_weighted_and_each_is_kept(pool):
    (one,) = score(pool("right", "brief", weights=[1.0, 0.5]), ["42"])
    assert one == Score(value=0.0, parts={"right": 1.0, "brief": -2.0})
    (one,) = score(pool("right", "parts"), ["42"])
    assert one == Score(value=4.0, parts={"right": 1.0, "parts/form": 1.0, "parts/style": 2.0})


def test_a_dict_is_the_sum_of_its_parts(pool):
    assert score(pool("parts"), ["ab"]) == [Score(value=3.0, parts={"form": 1.0, "style": 2.0})]


def test_numpys_scalars_are_numbers_its_truth_values_too_and_arrays_are_not(pool):
    assert score(pool("scalars"), ["a"]) == [Score(value=3.5, parts={"equal": 1.0, "all": 2.5})]
    (one,) = score(pool("arrays"), ["a"])
    assert one == Score(value=None, error="arrays answered array([1.]), a ndarray and not a number")


def test_none_is_no_answer_and_never_0(pool):
    assert score(pool("right", "silent"), ["42"]) == [
        Score(value=None, error="silent gave no answer (None)", is_unanswered=True)
    ]
    assert score(pool("half_silent"), ["a"]) == [
        Score(value=None, error="half_silent gave no answer for style (None)", is_unanswered=True)
    ]


def test_a_sum_that_is_not_finite_names_the_functions(pool):
    (one,) = score(pool("huge", "right", weights=[10.0, 1.0]), ["a"])
    assert one == Score(value=None, error="the rewards of huge, right add up to inf")


def test_a_function_gets_what_its_signature_asks_for(pool):
    made = [
        SimpleNamespace(token_ids=(1, 2, 3), finish_reason="length"),
        SimpleNamespace(token_ids=(), finish_reason="stop"),
    ]
    asks = pool("asks")
    assert [one.value for one in score(asks, ["a", "b"], made=made)] == [2213.0, 2200.0]
    assert [one.value for one in score(asks, ["a"], made=made[:1], group=["a", "b", "c"])] == [2313.0]


def test_async_functions_score_a_group_side_by_side_on_one_loop(pool):
    judge = pool("judge")
    score(judge, ["warm"])
    began = time.monotonic()
    scores = score(judge, [str(n) for n in range(40)])
    assert time.monotonic() - began < 40 * 0.3, "one after another"
    assert scores == [Score(value=1.0, parts={"judge": 1.0})] * 40
    assert [one.value for one in score(pool("on_one_loop"), ["a"] * 3)] == [1.0] * 3


@pytest.mark.slow
def test_an_async_function_that_fails_or_never_returns_costs_only_its_own_reward(pool):
    soon_s = round(scaled(1.5), 1)
    failed, late, sound = score(pool("judge", "right", timeout=soon_s), ["fail", "hang", "ok"])
    assert failed == Score(value=None, error="KeyError: 'spoon' (part_rewards.py:35)")
    assert late == Score(value=None, error=f"took longer than reward.timeout={soon_s:g} s")
    assert sound.value == 1.0


@pytest.mark.slow
def test_an_async_function_that_blocks_its_loop_is_killed(pool):
    soon_s = round(scaled(1.5), 1)
    first, blocked, last = score(pool("judge", timeout=soon_s), ["a", "block", "b"])
    assert (first.value, last.value) == (1.0, 1.0) or first.error == blocked.error
    assert blocked == Score(value=None, error=f"took longer than reward.timeout={soon_s:g} s (part_rewards:judge)")
    assert last.value == 1.0


def test_a_group_is_divided_among_the_processes_and_stays_in_order(pool):
    scores = score(pool("brief", workers=3), ["a" * n for n in range(8)])
    assert [one.value for one in scores] == [-float(n) for n in range(8)]


@pytest.mark.slow
def test_the_example_runs_code_apart_with_limits(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "assets" / "examples")
    tests = "assert add(2, 3) == 5"
    prompt = Prompt(id="p", token_ids=(), record={"question": "add", "answer": tests})
    good = "```python\ndef add(a, b):\n    return a + b\n```"
    bad = {
        "wrong": good.replace("+", "-"),
        "endless": "```python\nwhile True: pass\n```",
        "hungry": "```python\nx = bytearray(10**10)\n```",
        "exits early": "```python\nimport os\nos._exit(0)\n```",
        "no code": "I can't.",
    }
    with RewardPool(RewardConfig(fn="code_reward:passes_tests", timeout=scaled(60.0))) as pool:
        scores = asyncio.run(pool.score([good, *bad.values()], prompt))
    assert [one.value for one in scores] == [1.0] + [0.0] * len(bad), [one.error for one in scores]
