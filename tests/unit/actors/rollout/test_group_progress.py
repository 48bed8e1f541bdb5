"""A prompt's completions over several requests: each token once, the sampling of what is left, no other weights."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.request_loop import GroupProgress
from actors.serving.completions import UNFINISHED, Samples
from actors.serving.sglang_client import RequestFailed, Sampling
from launcher.base.rollouts import Completion
from launcher.config.schema import GenerationConfig

PROMPT = (1, 2, 3)
SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=20, min_new_tokens=4))
GONE = RequestFailed("gone", kind="reset")


def part(tokens, *, finish=UNFINISHED, version=7, server="a"):
    logprobs = tuple(-float(token) for token in tokens)
    return Completion(
        token_ids=tuple(tokens), logprobs=logprobs, weight_version=version, finish_reason=finish, server=server
    )


def test_the_next_request_continues_at_the_last_token():
    progress = GroupProgress(PROMPT, [SAMPLING] * 3, 7)
    progress.take_samples(Samples(completions={1: part((9,), finish="stop")}, begun={2: part((5, 6))}, failure=GONE))
    assert (progress.missing(), progress.kept_tokens) == ([0, 2], 0)
    inputs, samplings = progress.request()
    assert inputs == [PROMPT, (*PROMPT, 5, 6)]
    assert [(one.max_new_tokens, one.min_new_tokens) for one in samplings] == [(20, 4), (18, 2)]
    rest = {0: part((8,), finish="stop", server="b"), 1: part((7,), finish="length", server="b")}
    progress.take_samples(Samples(completions=rest, failure=None))
    assert progress.missing() == []
    assert progress.kept_tokens == 2
    last = progress.completions()[2]
    assert (last.token_ids, last.logprobs) == ((5, 6, 7), (-5.0, -6.0, -7.0))
    assert (last.finish_reason, last.weight_version, last.server) == ("length", 7, "a b")
    assert [one.server for one in progress.completions()] == ["b", "a", "a b"]


@pytest.mark.parametrize("version", [6, 8])
def test_tokens_of_other_weights_are_neither_taken_nor_continued(version):
    progress = GroupProgress(PROMPT, [SAMPLING] * 2, 7)
    whole, begun = part((9,), finish="stop", version=version), part((5,), version=version)
    progress.take_samples(Samples(completions={0: whole}, begun={1: begun}, failure=GONE))
    assert progress.request()[0] == [PROMPT, PROMPT]
    with pytest.raises(KeyError):
        progress.completions()


def test_a_completion_may_be_continued_by_newer_weights_and_says_which_made_how_many_tokens():
    progress = GroupProgress(PROMPT, [SAMPLING] * 2, 7, or_newer=True)
    progress.take_samples(Samples(completions={}, begun={0: part((5, 6)), 1: part((3,), version=6)}, failure=GONE))
    assert progress.request()[0] == [(*PROMPT, 5, 6), PROMPT], "what is too old is not continued"
    progress.take_samples(
        Samples(completions={}, begun={0: part((8,), version=8), 1: part((4,), version=8)}, failure=GONE)
    )
    last = {place: part((9,), finish="stop", version=8) for place in range(2)}
    progress.take_samples(Samples(completions=last, failure=None))
    one, other = progress.completions()
    assert (one.token_ids, one.weight_version, one.versions) == ((5, 6, 8, 9), 7, ((7, 2), (8, 2)))
    assert (other.token_ids, other.weight_version, other.versions, other.runs) == ((4, 9), 8, (), ((8, 2),))


@given(st.integers(0, 2**32))
def test_wherever_it_breaks_off_each_token_is_there_once(seed):
    draw = random.Random(seed)
    whole = [tuple(draw.randrange(100) for _ in range(draw.randint(1, 20))) for _ in range(4)]
    progress = GroupProgress(PROMPT, [SAMPLING] * len(whole), 7)
    while missing := progress.missing():
        complete, begun = {}, {}
        for place, (asked, index) in enumerate(zip(progress.request()[0], missing, strict=True)):
            left = whole[index][len(asked) - len(PROMPT) :]
            assert asked == PROMPT + whole[index][: len(asked) - len(PROMPT)]
            made = draw.randint(0, len(left))
            if made == len(left):
                complete[place] = part(left, finish="stop")
            elif made:
                begun[place] = part(left[:made])
        progress.take_samples(Samples(completions=complete, begun=begun, failure=GONE))
    assert [one.token_ids for one in progress.completions()] == whole
