"""What counts as the right answer, and how a reward function is found."""

import logging
import sys

import pytest

from actors.data.answers import final_answers, has_number, plain_number
from actors.reward.gsm8k import gsm8k_reward
from actors.reward.reward_import import load_reward_fn
from launcher.base.errors import RewardImportError


def reward(completion, answer="so 40+2=42\n#### 42"):
    return gsm8k_reward(completion=completion, answer=answer, prompt_id="p", record={})


@pytest.mark.slow
@pytest.mark.parametrize(
    "completion",
    [
        "40+2=42\n#### 42",
        "####42",
        "#### 42.",
        "#### 42.00",
        "#### $42",
        "#### \\$42",
        "#### 42%",
        "#### 42 dollars",
        "#### **42**",
        "#### +42",
        "#### x = 42",
        "####\n42",
        "#### 41\nno, wait\n#### 42",
        "#### 42\nThat is all.",
        "The answer is \\boxed{42}.",
        "\\boxed{ 42 }",
        "\\boxed{\\text{42 apples}}",
        "\\boxed{42\\text{ apples}}",
        "\\boxed{41} or rather \\boxed{42}",
        "\\boxed{42}\n#### Conclusion\nDone",
        "\\[ \\boxed{\\$42} \\]",
        "#### \\frac{84}{2}",
        "#### (42)",
        "\\boxed{4.2 \\times 10^{1}}",
    ],
)
def test_right(completion):
    assert reward(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "42",
        "the answer is 42",
        "#### 41",
        "#### 421",
        "#### -42",
        "#### 42\n#### 41",
        "\\boxed{42} #### 41",
        "#### 4 2",
        "#### 42 43",
        "#### 42, 41",
        "#### 41 or 42",
        "#### forty-two",
        "#### ",
        "####",
        "\\boxed{42",  # cut off: it may have been 421
        "\\boxed{}",
        "#### 42x",
        "#### 1/0",
    ],
)
def test_wrong(completion):
    assert reward(completion) == 0.0


@pytest.mark.parametrize(
    "completion",
    ["#### 40+2", "#### 21*2", "#### 6\\times 7", "#### 6 \\cdot 7", "#### 44-2", "#### 6(7)", "\\boxed{40 + 2}"],
)
def test_arithmetic_left_to_the_verifier_is_no_answer(completion):
    """Else a model learns to copy the problem after the marker: the reward climbs and nothing is learned."""
    assert reward(completion) == 0.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("#### 1,200", "#### 1200"),
        ("#### 1200", "#### 1,200.0"),
        ("#### 70,000", "\\boxed{70{,}000}"),
        ("#### -3", "#### - 3"),
        ("#### 0.5", "#### .5"),
        ("#### 0.5", "#### 1/2"),
        ("#### 1/3", "\\boxed{\\frac{1}{3}}"),
        ("#### 1/3", "\\boxed{\\dfrac{2}{6}}"),
        ("#### 2.5", "#### 2 1/2"),
        ("#### 3.5", "\\boxed{3\\frac{1}{2}}"),
        ("#### \\sqrt{2}", "\\boxed{\\sqrt{2}}"),
    ],
)
def test_equal_in_another_form(answer, completion):
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(("answer", "completion"), [("#### 1/3", "#### 0.33"), ("#### 0.1", "#### 0.10001")])
def test_close_is_not_equal(answer, completion):
    assert reward(completion, answer) == 0.0


def test_long_nonsense_is_wrong_and_raises_nothing():
    for text in (
        "9" * 5000,
        "#### " * 2000,
        "\\boxed{" * 1000,
        "(" * 500,
        "9^9^9^9^9",
        "#### 1/0\n" * 500,
        "a b " * 1000,
    ):
        assert reward(f"#### {text}") == 0.0


def test_an_answer_without_a_number_raises_and_names_the_prompt():
    with pytest.raises(ValueError, match=r"prompt p has no number after ####.*'#### many'"):
        reward("#### 42", answer="#### many")


def test_math_verify_does_not_fill_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        assert reward("#### 3/4", answer="#### \\frac{3}{4}") == 1.0
    assert not caplog.records


def test_marked_answers_come_last_first():
    assert list(final_answers("#### 1 \n \\boxed{\\frac{1}{2}} and \\fbox{x} #### 3")) == ["3", "\\frac{1}{2}", "1"]


def test_plain_numbers_are_exact():
    assert plain_number("0.1") + plain_number("0.2") == plain_number("0.3")
    assert plain_number("3/4") is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("#### 42", True),
        ("#### 3/4", True),
        ("\\boxed{\\frac{3}{4}}", True),
        ("#### many", False),
        ("42", False),
        ("", False),
    ],
)
def test_has_number(answer, expected):
    assert has_number(answer) is expected


def refused(path):
    with pytest.raises(RewardImportError) as error:
        load_reward_fn(path)
    assert f"reward.fn={path!r}" in str(error.value)
    return str(error.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes an importable module and forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_the_default_reward_is_found():
    assert load_reward_fn("actors.reward:gsm8k_reward") is gsm8k_reward


def test_ones_own_reward_is_found(module):
    module("own_reward", "def score(**everything): return 7")
    assert load_reward_fn("own_reward:score")(completion="c", answer="a", prompt_id="p", record={}) == 7


@pytest.mark.parametrize("path", ["my_rewards", "my_rewards:", ":score", "a:b:c", "a:b c"])
def test_a_path_that_names_no_function(path):
    assert "module:function" in refused(path)


def test_a_module_that_is_missing():
    assert "there is no module 'no_such_rewards'" in refused("no_such_rewards:score")
    assert "named without the ending of its file: actors.reward:score" in refused("actors.reward.py:score")


def test_a_module_that_imports_a_missing_one(module):
    module("needs_missing", "import no_such_dependency")
    assert "importing 'needs_missing' raised ModuleNotFoundError: No module named 'no_such_dependency'" in refused(
        "needs_missing:score"
    )


def test_a_module_that_raises(module):
    module("raising_module", "raise OSError('no licence')")
    assert "importing 'raising_module' raised OSError: no licence" in refused("raising_module:score")


def test_a_module_that_exits(module):
    module("exiting_module", "raise SystemExit(3)")
    assert "importing 'exiting_module' raised SystemExit: 3" in refused("exiting_module:score")


def test_a_function_that_is_missing(module):
    module("empty_module", "")
    assert "module 'empty_module' has no 'score'" in refused("empty_module:score")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score = 3", "is a int, not a function"),
        ("def score(completion, answer, /): return 1.0", "can't be called: 'completion' parameter is positional only"),
        (
            "def score(*, completion, answer, prompt_id, record, level): return 1.0",
            "missing a required argument: 'level'",
        ),
    ],
)
def test_what_can_not_be_called(module, text, expected):
    module("uncallable", text)
    assert expected in refused("uncallable:score")
