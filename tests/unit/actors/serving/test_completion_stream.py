"""A stream of completions, however it is cut: what came whole is kept, and why the rest is missing is said."""

import asyncio
import itertools
import json
from dataclasses import replace

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.serving.completions import CompletionStream
from actors.serving.sglang_client import RequestFailed, Sampling, SGLangClient
from launcher.config.schema import GenerationConfig
from tests.programs import stand_in_server

SERVER = "http://s"
DONE = b"data: [DONE]\n\n"
SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=6))


def answer(index, *, finish="stop", tokens=(4, 5), version="7", so_far=None):
    scored = [[-0.5, token, None] for token in tokens]
    meta = {
        "finish_reason": finish and {"type": finish},
        "weight_version": version,
        "completion_tokens": len(tokens) if so_far is None else so_far,
        "output_token_logprobs": scored,
    }
    return {"index": index, "output_ids": list(tokens), "meta_info": meta}


def event(said):
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def fed(n, *pieces):
    stream = CompletionStream(n, server=SERVER)
    stream.vocabulary = 10
    for piece in pieces:
        stream.feed(piece)
    return stream.samples()


WHOLE = event(answer(0, finish=None, tokens=(4,))) + event(answer(1)) + event(answer(0, tokens=(8, 9), so_far=3)) + DONE


@pytest.mark.slow
@given(st.lists(st.integers(0, len(WHOLE)), max_size=6))
def test_it_does_not_matter_where_the_pieces_are_cut(cuts):
    edges = [0, *sorted(cuts), len(WHOLE)]
    samples = fed(2, *(WHOLE[a:b] for a, b in itertools.pairwise(edges)))
    assert samples.failure is None
    assert {index: one.token_ids for index, one in samples.completions.items()} == {0: (4, 8, 9), 1: (4, 5)}


@given(st.integers(0, len(WHOLE) - len(DONE) - 1))
def test_of_a_stream_that_ends_early_the_whole_ones_are_kept(length):
    samples = fed(2, WHOLE[:length])
    events = WHOLE[:length].count(b"\n\n")
    assert set(samples.completions) == set([[], [], [1], [0, 1]][events])
    assert samples.failure is not None
    assert samples.failure.retryable


@pytest.mark.parametrize(
    ("second", "kind", "retryable", "said"),
    [
        (answer(1, finish="abort"), "aborted", True, "aborted the request after 2 tokens"),
        (answer(1, tokens=()), "empty", True, "no tokens"),
        (answer(1, version="default"), "malformed", True, "default"),
        (answer(0), "malformed", True, "completion 0 of 2, or that one twice"),
        (answer(2), "malformed", True, "completion 2 of 2"),
        (answer("1"), "malformed", True, "completion '1' of 2"),
        ({"error": {"code": 400, "message": "too long"}}, "http_4xx", False, "HTTP 400 too long"),
        ({"error": {"code": 503, "message": "draining"}}, "http_5xx", True, "HTTP 503 draining"),
        ({"error": "what?"}, "malformed", True, "TypeError"),
        ({"output_ids": [4]}, "malformed", True, "index"),
        ([1], "malformed", True, "TypeError"),
        (answer(1, tokens=(4, -1)), "impossible", True, "token -1"),
        (answer(1, tokens=(4, 10)), "impossible", True, "token 10, and the model has 10"),
    ],
)
def test_one_that_is_no_completion_costs_itself_alone(second, kind, retryable, said):
    samples = fed(2, event(answer(0)), event(second), DONE)
    assert set(samples.completions) == {0}
    assert samples.failure is not None
    assert (samples.failure.kind, samples.failure.retryable) == (kind, retryable)
    assert said in samples.failure.message
    assert SERVER in samples.failure.message


BEGUN = event(answer(0, finish=None)) + event(answer(1, finish=None, tokens=(6,)))


@pytest.mark.parametrize("kind", ["reset", "truncated", "timeout", "aborted", "moved"])
def test_what_was_begun_when_the_server_was_gone_is_there_for_another_to_continue(kind):
    stream = CompletionStream(3, server=SERVER)
    stream.feed(BEGUN + event(answer(0, finish=None, tokens=(8, 9), so_far=4)) + event(answer(2)))
    samples = stream.samples(broken_off=RequestFailed("gone", kind=kind))
    assert {index: (one.token_ids, one.finish_reason) for index, one in samples.begun.items()} == {
        0: ((4, 5, 8, 9), ""),
        1: ((6,), ""),
    }
    assert samples.begun[0].logprobs == (-0.5,) * 4
    assert set(samples.completions) == {2}


def test_an_abort_keeps_what_came_before_it():
    samples = fed(2, BEGUN, event(answer(0, finish="abort", tokens=(8,), so_far=3)), event(answer(1, so_far=3)), DONE)
    assert samples.begun[0].token_ids == (4, 5)
    assert samples.completions[1].token_ids == (6, 4, 5)
    assert samples.failure is not None
    assert samples.failure.kind == "aborted"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (answer(0, so_far=5), "4 tokens of completion 0, not 5"),  # a part got lost
        (answer(0, so_far=1), "2 tokens of completion 0, not 1"),
        (answer(0, version="8", so_far=4), "two weight versions"),
    ],
)
def test_parts_that_do_not_belong_together_are_no_completion_and_nothing_to_continue(second, said):
    samples = fed(1, event(answer(0, finish=None)), event(second), DONE)
    assert (samples.completions, samples.begun) == ({}, {})
    assert samples.failure is not None
    assert samples.failure.kind == "malformed"
    assert said in samples.failure.message


def test_events_with_all_tokens_so_far_are_understood_too():
    """As a server without --incremental-streaming-output sends them."""
    samples = fed(1, event(answer(0, finish=None)), event(answer(0, tokens=(4, 5, 6))), DONE)
    assert samples.completions[0].token_ids == (4, 5, 6)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ((event(answer(0)), DONE), "malformed"),  # it says that it is done
        ((event(answer(0)),), "truncated"),
        ((), "truncated"),
        ((b'{"output_ids": []}',), "malformed"),
        ((b"<html>\n\n", DONE), "malformed"),
        ((b"data: {torn\n\n", DONE), "malformed"),
    ],
)
def test_an_end_without_all_of_them_is_a_failure(sent, kind):
    failure = fed(2, *sent).failure
    assert failure is not None
    assert failure.kind == kind


# ── through HTTP ──


@pytest.fixture(scope="module")
def server():
    with stand_in_server.running("--weight-version", "3") as url:
        yield url


def samples_of(url, *, fault=None, samplings=(SAMPLING,) * 4, timeout_s=10.0):
    async def work():
        if fault is not None:
            async with aiohttp.ClientSession() as session:
                await session.post(f"{url}/stand_in/fault", json=fault)
        async with SGLangClient() as client:
            stream = CompletionStream(len(samplings), server=url)
            inputs = [(5, 6)] * len(samplings)
            return await client.generate_samples(url, stream, inputs=inputs, samplings=samplings, timeout_s=timeout_s)

    return asyncio.run(work())


@pytest.mark.slow
def test_all_samples_come_in_one_request(server):
    samples = samples_of(server)
    assert samples.failure is None
    assert sorted(samples.completions) == [0, 1, 2, 3]
    assert {(one.weight_version, one.server) for one in samples.completions.values()} == {(3, server)}
    assert len({one.logprobs for one in samples.completions.values()}) == 4


def test_seeds_make_each_sample_reproducible(server):
    seeded = replace(SAMPLING, seed=5).for_samples(3)
    assert [one.seed for one in seeded] == [5, 6, 7]
    first, second = samples_of(server, samplings=seeded), samples_of(server, samplings=seeded)
    assert first.completions == second.completions


@pytest.mark.parametrize(
    ("fault", "kind", "kept"),
    [
        ("reset", "reset", 0),
        ("503", "http_5xx", 0),
        ("400", "http_4xx", 0),
        ("truncated", "truncated", 2),
        ("not_json", "malformed", 0),
        ("empty", "empty", 3),
        ("nan_logprobs", "nonfinite", 3),
        ("no_version", "malformed", 3),
    ],
)
def test_a_fault_is_a_failure_of_its_kind_beside_what_came_whole(server, fault, kind, kept):
    samples = samples_of(server, fault={"kind": fault})
    assert samples.failure is not None
    assert samples.failure.kind == kind
    assert len(samples.completions) == kept


async def test_a_token_that_the_model_has_not_is_no_completion(server):
    """The trainer's process ended of it, and was restarted until the run halted; the server kept its traffic."""
    async with SGLangClient() as client:
        client.vocabulary = 2  # the stand-in makes no smaller ones
        with pytest.raises(RequestFailed, match=r"with token \d+, and the model has 2"):
            await client.generate(server, token_ids=[1, 2], sampling=SAMPLING, timeout_s=10.0)
        stream = CompletionStream(1, server=server)
        asked = {"inputs": [(1, 2)], "samplings": [SAMPLING], "timeout_s": 10.0}
        samples = await client.generate_samples(server, stream, **asked)
    assert samples.failure is not None
    assert samples.failure.kind == "impossible"


def test_a_deadline_ends_the_request(server):
    samples = samples_of(server, fault={"kind": "slow", "seconds": 60}, timeout_s=0.2)
    assert samples.failure is not None
    assert samples.failure.kind == "timeout"
    assert "no answer within 0.2 s" in samples.failure.message


def test_nobody_there_is_refused():
    samples = samples_of("http://127.0.0.1:9")
    assert samples.failure is not None
    assert (samples.failure.kind, samples.completions) == ("refused", {})
