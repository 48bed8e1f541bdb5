"""A completion that was cut and continued is the one that nobody has cut, wherever it was."""

import pytest

from actors.foreign.partial_answer import PartialAnswer, can_be_continued
from launcher.base.errors import RequestFailed
from tests.support.foreign.counting_server import CountingServer, completion

IDS = [3, 1, 4]
ASKED = {
    "input_ids": IDS,
    "sampling_params": {"max_new_tokens": 9, "min_new_tokens": 4, "temperature": 0.0},
    "return_logprob": True,
    "stream": False,
    "rid": "mine",
    "image_data": None,
}


def event(made, begun, end, ids, finish=None):
    answer = CountingServer("server-0").event(ids, made[begun:end], end, finish)
    answer["meta_info"]["prompt_tokens"] = len(ids)
    return answer


def whole(cuts, step=1):
    """The answer where a server was lost after each of these numbers of tokens."""
    partial, made, at = PartialAnswer(ASKED, stream_interval=8), completion(IDS, 9), 0
    for end in [*cuts, 9]:
        request = partial.request()
        ids = request["input_ids"]
        assert ids == [*IDS, *made[:at]]
        assert request["sampling_params"]["max_new_tokens"] == 9 - at
        assert request["sampling_params"]["min_new_tokens"] == max(0, 4 - at)
        is_long = 9 - at > 8  # else all of it comes at once in any case
        assert (request["sampling_params"].get("stream_interval"), request["stream"]) == (
            -8 if is_long else None,
            is_long,
        )
        rest, begun = completion(ids, 9 - at), 0
        while begun < end - at:
            to = min(begun + step, end - at)
            finish = {"type": "length", "length": 9 - at} if at + to == 9 else None
            partial.take_event(event(rest, begun, to, ids, finish), server="s")
            begun = to
        at = end
        if end != 9:
            partial.cut()
            assert partial.finish is None
    return partial.answer()


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("cuts", [*([n] for n in range(9)), [0, 0], [2, 5], [1, 2, 3, 8]])
def test_wherever_it_was_cut_the_answer_is_the_same(cuts, step):
    assert whole(cuts, step) == whole([], step)


def test_what_had_all_arrived_is_not_asked_for_again():
    partial, made = PartialAnswer(ASKED, stream_interval=8), completion(IDS, 9)
    partial.request()
    partial.take_event(event(made, 0, 9, IDS), server="s")
    partial.cut()
    assert partial.finish == {"type": "length", "length": 9}


def test_an_abort_leaves_what_there_is():
    partial, made = PartialAnswer(ASKED, stream_interval=8), completion(IDS, 9)
    partial.request()
    partial.take_event(event(made, 0, 4, IDS), server="s")
    partial.abort()
    answer = partial.answer()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"] == made[:4] == [one[1] for one in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("damage", ["count", "logprobs", "shape"])
def test_tokens_that_do_not_follow_those_before_are_refused(damage):
    partial, wrong = PartialAnswer(ASKED, stream_interval=8), event(completion(IDS, 9), 0, 4, IDS)
    partial.request()
    match damage:
        case "count":
            wrong["meta_info"]["completion_tokens"] = 5
        case "logprobs":
            wrong["meta_info"]["output_token_logprobs"].pop()
        case _:
            del wrong["meta_info"]
    with pytest.raises(RequestFailed):
        partial.take_event(wrong, server="s")
    assert partial.tokens == []


@pytest.mark.parametrize(
    ("change", "sampling", "can"),
    [
        ({}, {}, True),
        ({"image_data": ["…"]}, {}, False),
        ({"text": "a"}, {}, False),
        ({"input_ids": [[1, 2], [3]]}, {}, False),
        ({"input_ids": None}, {}, False),
        ({"top_logprobs_num": 2}, {}, False),
        ({"top_logprobs_num": 0}, {}, True),
        ({}, {"n": 1, "stop": [], "frequency_penalty": 0.0, "repetition_penalty": 1.0}, True),
        ({}, {"n": 2}, False),
        ({}, {"stop": ["\n"]}, False),
        ({}, {"frequency_penalty": 0.5}, False),
        ({}, {"json_schema": "{}"}, False),
        ({"sampling_params": None}, None, True),
        ({}, {"max_new_tokens": None, "min_new_tokens": 2}, True),
        ({}, {"max_new_tokens": "many"}, False),  # a server says what is wrong with it
        ({}, {"min_new_tokens": [2]}, False),
    ],
)
def test_what_can_be_continued(change, sampling, can):
    asked = {**ASKED, **change}
    if sampling:
        asked["sampling_params"] = sampling
    assert can_be_continued(asked) is can
