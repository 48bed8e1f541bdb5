"""Before the first step: does the reward function give right answers of the data more than wrong ones?"""

import asyncio
import re
import signal
import threading
from types import SimpleNamespace

import pytest

from actors.data.answer_shapes import pairs_of, text_of
from actors.reward.reward_functions import NoReward, failure_of
from actors.reward.reward_pool import Score
from actors.reward.reward_trial import try_reward
from launcher.base.errors import RewardImportError


class Scorer:
    """Calls a function as the pool's processes do."""

    def __init__(self, fn):
        self.fn = fn
        self.asked = 0

    async def score(self, completions, prompt):
        self.asked += len(completions)
        return [self._one(text, prompt) for text in completions]

    def _one(self, text, prompt):
        try:
            value = self.fn(text, prompt.answer)
        except NoReward as error:
            return Score(value=None, error=failure_of(error)["error"], is_no_reward=True)
        except ValueError as error:
            return Score(value=None, error=str(error))
        return Score(value=value, is_unanswered=value is None, error="" if value is not None else "f gave no answer")


def records(*answers):
    return [
        SimpleNamespace(id=f"p{place}", where=f"d.jsonl:{place + 1}", answer=answer, record={}, dataset="")
        for place, answer in enumerate(answers)
    ]


SUMS = records(*(f"{n}+1={n + 1}\n#### {n + 1}" for n in range(1, 40)))


def tried(fn, these=SUMS, **more):
    scorer = Scorer(fn)
    return try_reward(these, scorer, key="train_dataset", **more), scorer.asked


def last_number(text, mark):
    found = re.findall(mark + r"\s*(-?\d+)", text)
    return found[-1] if found else None


def in_thread(completion, answer):
    """An alarm can't be set in a thread, and a broad `except` makes a reward of 0 of that."""
    out = []

    def work():
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            out.append(float(last_number(completion, "####") == last_number(answer, "####")))
        except Exception:  # noqa: BLE001 - what such a function does
            out.append(0.0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return out[0]


@pytest.mark.parametrize("fn", [in_thread, lambda c, a: 1.0, lambda c, a: float(c != a), lambda c, a: -1.0])
def test_a_function_that_gives_right_answers_no_more_is_told(fn):
    said, _ = tried(fn)
    assert said.startswith("train_dataset: reward.fn gives right answers no more than wrong ones: those of 8 records, ")
    assert "give reward.canaries" in said


READS = {
    "####": lambda text: last_number(text, "####"),
    "boxed": lambda text: last_number(text, r"boxed\{"),
    "tags": lambda text: (re.findall(r"<think>\n.*?\n</think>\n<answer>\n(.*?)\n</answer>", text) or [None])[0],
    "tags in a line": lambda text: (re.findall(r"<answer>([^\n\\<]*)</answer>", text) or [None])[0],
    "Answer:": lambda text: last_number(text, "Answer:"),
    "JSON": lambda text: last_number(text, '^{"answer": "'),
    "the answer alone": lambda text: text if re.fullmatch(r"\d+", text) else None,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("form", ["{}", "so\n#### {}", {"ground_truth": "{}", "style": ""}, '{{"answer": {}}}', ["{}"]])
def test_each_usual_form_of_an_answer_is_tried_whatever_form_the_data_has(read, form):
    def written(n):
        if isinstance(form, dict):
            return form | {"ground_truth": str(n)}
        return [str(n)] if isinstance(form, list) else form.format(n)

    right = {written(n) if isinstance(form, str) else str(written(n)): str(n) for n in range(20, 40)}

    def score(completion, answer):
        return float(READS[read](completion) == right[answer if isinstance(form, str) else str(answer)])

    assert tried(score, records(*(written(n) for n in range(20, 40))))[0] == ""


def test_answers_without_a_number_have_another_records_answer_for_a_wrong_one():
    these = records(*["Paris", "Rome", "Berlin", "Rome"] * 4)
    assert tried(lambda c, a: float(a in c), these)[0] == ""
    assert "no more than wrong ones" in tried(lambda c, a: 0.5, these)[0]
    assert tried(lambda c, a: float(c.strip() == str(a)), records(7, 8, 9))[0] == ""


@pytest.mark.parametrize("answer", [None, "", {"tests": [1], "inputs": [2]}, "assert f(1) == 2\n" * 500, []])
def test_what_can_t_be_asked_is_said_to_be_unchecked(answer):
    said, asked = tried(lambda c, a: 1.0, records(*[answer] * 4))
    assert "could not be checked, as no right and wrong completion can be made of its answers" in said
    assert asked == 0
    said, _ = tried(lambda c, a: 1.0, records("yes", "yes"))
    assert "could not be checked" in said


def test_a_sound_function_is_asked_once_for_each_and_a_slow_one_no_longer_than_a_limit():
    said, asked = tried(lambda c, a: float(last_number(c, "####") == last_number(a, "####")))
    assert (said, asked) == ("", 16)

    class Slow:
        async def score(self, completions, prompt):
            await asyncio.Event().wait()

    said = try_reward(SUMS, Slow(), key="train_dataset", within_s=0.01)
    assert "could not be checked within 0.01 s" in said


def test_a_right_answer_that_gets_no_score_is_refused():
    with pytest.raises(RewardImportError, match=r"gives no score to the right answer of d.jsonl:1, .*f gave no answer"):
        tried(lambda c, a: None)
    with pytest.raises(RewardImportError, match=r"the right answer of d.jsonl:9, "):  # a branch without a return
        tried(lambda c, a: None if a.startswith("9") else float(last_number(c, "####") == last_number(a, "####")))

    def raising(completion, answer):
        raise ValueError("no service")

    with pytest.raises(RewardImportError, match=r"no service"):
        tried(raising)
    assert tried(lambda c, a: float(c == f"#### {last_number(a, '####')}") if "\n" not in c else None)[0] == ""


def is_right(completion, answer):
    return last_number(completion, "####") == last_number(answer, "####")


@pytest.mark.parametrize("rest", [lambda c: 0.0, lambda c: 0.0 if "####" in c else None])
def test_a_right_answer_without_a_score_is_refused_also_where_wrong_ones_or_those_of_others_have_one(rest):
    reads = r"no score to the right answer of d.jsonl:1, in (the form that it reads|none of 10 forms): f gave"
    with pytest.raises(RewardImportError, match=reads):  # the branch of the right answer has no return
        tried(lambda c, a: None if is_right(c, a) else rest(c))
    with pytest.raises(RewardImportError, match=reads.replace(":1", ":9")):
        tried(lambda c, a: rest(c) if not is_right(c, a) else None if a.startswith("9") else 1.0)


def test_a_judge_that_has_no_answer_now_and_then_is_not_accused():
    asked = []

    def flaky(completion, answer):
        asked.append(completion)
        return None if len(asked) % 5 == 0 else float(is_right(completion, answer))

    assert tried(flaky)[0] == ""


def test_wrong_answers_that_never_get_a_score_are_told_as_that():
    said, _ = tried(lambda c, a: 1.0 if is_right(c, a) else None)
    assert said.startswith("train_dataset: reward.fn gives no score to wrong answers, where right ones get one: f gave")
    assert "no more than wrong ones" not in said


def test_what_is_no_reward_is_refused_also_where_only_some_forms_get_it():
    def dict_if_parsed(completion, answer):
        if completion.startswith("Answer:"):
            raise NoReward("f answered a dict with score beside acc")
        return 0.0

    with pytest.raises(RewardImportError, match="score beside acc"):
        tried(dict_if_parsed)


def test_the_text_of_an_answer():
    assert text_of({"style": "rule", "ground_truth": {"target": 98}}) == "98"
    assert text_of('{"ground_truth": "4"}') == "4"
    assert text_of("[1, 2") == "[1, 2"
    assert text_of(True) == "True"
    assert text_of(0.5) == "0.5"
    assert pairs_of("#### 1,200", [])["#### …"].right == "#### 1,200"
