"""Reward functions as other projects' users have them: refused with what each part of them is here."""

import functools

import pytest

from actors.reward.reward_functions import NoReward, parts_of
from actors.reward.reward_import import ARGUMENTS, KEY, check_signature, is_async
from launcher.base.errors import RewardImportError


def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs): ...


def verl(data_source, solution_str, ground_truth, extra_info=None): ...


def trl(completions, solution, **kwargs): ...


def openrlhf(queries, prompts, labels): ...


def verifiers(*, completion, answer, state): ...


def quietly_wrong(completion, ground_truth=None): ...


def quietly_empty(completion, extra_info={}): ...  # noqa: B006


def of_a_batch(data_sources, solution_strs, ground_truths, extra_infos): ...


def columns(completion, test_cases): ...


def by_place(*args): ...


def only_by_place(completion, answer, /): ...


class Scorer:
    def __call__(self, completion, ground_truth): ...


class Judge:
    async def __call__(self, completion): ...


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (
            areal,
            (
                "can't be called: missing required arguments: 'prompt', 'completions', 'prompt_ids', 'completion_ids'",
                "prompt → record (",
                "completions → completion (",
                "prompt_ids → nothing",
                "completion_ids → token_ids (",
            ),
        ),
        (
            verl,
            (
                "missing required arguments: 'data_source', 'solution_str', 'ground_truth'",
                "data_source → record['data_source']",
                "solution_str → completion (",
                "ground_truth → answer (",
                "extra_info → record (",
            ),
        ),
        (trl, ("'completions', 'solution'", "completions → completion (", "solution → answer (")),
        (openrlhf, ("'queries', 'prompts', 'labels'", "prompts → record (", "labels → answer (")),
        (verifiers, ("missing a required argument: 'state'", "state → nothing")),
        (quietly_wrong, ("asks for what it would never be given", "ground_truth → answer (")),
        (quietly_empty, ("asks for what it would never be given", "extra_info → record (")),
        (of_a_batch, ("solution_strs → completion (", "ground_truths → answer (", "extra_infos → record (")),
        (columns, ("missing a required argument: 'test_cases'", "test_cases → record['test_cases'] where that is a")),
        (by_place, ("takes its arguments by their places (*), and they are given by name",)),
        (only_by_place, ("can't be called: 'completion' parameter is positional only",)),
        (Scorer(), ("missing a required argument: 'ground_truth'", "ground_truth → answer (")),
        (Scorer, ("is a class, and a call of it makes an object", "`scorer = Scorer(…)`")),
        (functools.partial(verl, "maths"), ("'solution_str', 'ground_truth'", "extra_info → record (")),
    ],
)
def test_all_foreign_arguments_are_named_at_once_each_with_ours(fn, said):
    with pytest.raises(RewardImportError) as error:
        check_signature("m:f", fn, KEY, ARGUMENTS)
    for part in said:
        assert part in str(error.value)


def options_of_its_own(completion, answer, *, tolerance=1e-6, lower=True, **kwargs): ...


def of_length(completion, target=500, text="a", index=0): ...


def with_tools_of_its_own(completion, answer, parser=float, tokenizer=None, config=None, task="maths"): ...


@pytest.mark.parametrize(
    "fn", [options_of_its_own, of_length, with_tools_of_its_own, lambda: 1.0, lambda **all: 1.0, Judge(), max]
)
def test_options_of_ones_own_are_no_foreign_arguments(fn):
    check_signature("m:f", fn, KEY, ARGUMENTS)


def test_an_object_whose_call_is_async_is_awaited():
    assert is_async(Judge())
    assert not is_async(Scorer())
    assert not is_async(max)


@pytest.mark.parametrize(
    ("answer", "readings"),
    [
        ({"score": 1.0, "acc": True}, ("score beside acc", "it is 1.0;", "their sum is 2.")),
        ({"acc": 1, "total": 0.5, "form": 0.25}, ("total beside acc, form", "it is 0.5;", "their sum is 1.75.")),
        ({"reward": 1.0, "metrics": {"acc": 1}}, ("reward beside metrics", "it is 1.0;", "not all are numbers")),
        ({"score": 0.0, "pred": "42"}, ("score beside pred", "it is 0.0;", "not all are numbers")),
        ({"final_reward": 1, "format": 1}, ("final_reward beside format",)),
        ({"overall": 1, "format": 0, "accuracy": 1}, ("overall beside format, accuracy",)),
        ({"value": 1, "acc": 1}, ("value beside acc",)),
        ({"avg_score": 1, "acc": 1}, ("avg_score beside acc",)),
        ({"totalScore": 1, "format": None}, ("totalScore beside format",)),
    ],
)
def test_a_dict_with_a_whole_reward_beside_other_keys_is_refused_with_both_readings(answer, readings):
    with pytest.raises(NoReward) as error:
        parts_of("f", answer)
    for part in readings:
        assert part in str(error.value)


def test_parts_are_parts_and_one_key_has_one_reading():
    assert parts_of("f", {"format_reward": 0.5, "answer_score": 1}) == {"format_reward": 0.5, "answer_score": 1.0}
    assert parts_of("f", {"score": 0.5}) == {"score": 0.5}
    for two in (
        {"score_1": 0.5, "score_2": 1.0},
        {"result_reward": 1.0, "process_reward": 0.5},
        {"main": 1, "form": 0},
    ):
        assert parts_of("f", two) == two
    for many in ([1.0], (1.0, {"acc": 1}), [{"score": 1.0}]):
        with pytest.raises(NoReward, match="not a number; it answers one number, for one completion"):
            parts_of("f", many)
