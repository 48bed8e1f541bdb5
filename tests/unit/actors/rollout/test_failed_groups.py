"""A group that fails costs a try: its prompt comes back, and after so many the run ends with its name and reason."""

import asyncio
import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest

from actors.data.prompt_queue import PromptQueue
from actors.rollout import rollout_stream
from actors.rollout.rollout_stream import GroupFailed, RolloutStream
from launcher.base.errors import RewardError, RolloutError
from launcher.base.messages import Cause
from launcher.base.rollouts import Completion, Rollout, RolloutGroup
from launcher.config.supervision import GateConfig
from launcher.policy.admission import BatchReport, GateRules, admit
from tests.support.replay import prompts

ORDER = [*prompts(6)]
DONE = Rollout(
    completion=Completion(token_ids=(7,), logprobs=(-1.0,), weight_version=0, finish_reason="stop"), text="", reward=1.0
)


def stream_of(make, *, order=ORDER, n_samples=1, attempts=2, concurrent=1, **more):
    """`make(prompt, weights)` raises, waits, or returns nothing."""

    async def group(prompt, weights, tally, kept):
        await make(prompt.id, weights)
        return RolloutGroup(prompt=prompt, rollouts=(DONE,) * n_samples)

    return RolloutStream(
        group,
        PromptQueue(order, seed=1, shuffle=False),
        prompts(len(ORDER)),
        n_samples=n_samples,
        concurrent_prompts=concurrent,
        attempts=attempts,
        scored_by="the scorer's log",
        **more,
    )


async def some_turns():
    """So that one is given back before the next one, which waits for its place, is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("scoring", "kind", "hint"),
    [
        (False, RolloutError, "see llm_server-<i>.log; rollout.prompt_attempts"),
        (True, RewardError, "the scorer's log"),
    ],
)
async def test_a_prompt_that_fails_too_often_ends_the_wait_with_its_name_and_where_to_look(scoring, kind, hint):
    asked, dropped = [], []

    async def make(prompt_id, weights):
        asked.append(prompt_id)
        await some_turns()
        if prompt_id == "p001":
            raise GroupFailed("it broke", scoring=scoring)
        if prompt_id == "p003":
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                dropped.append(prompt_id)

    stream = stream_of(make, order=ORDER[:4], concurrent=2)
    with pytest.raises(kind) as raised:
        await stream.next_batch(4, version=0)
    assert (raised.value.message, raised.value.hint) == ("prompt p001 failed 2 times in one step, last: it broke", hint)
    assert asked.count("p001") == 2
    assert dropped == ["p003"], "nothing is left running"
    assert "p001" not in stream.queue.in_flight


async def test_prompts_in_a_row_that_can_not_be_scored_end_the_wait_before_each_of_the_epoch_is_tried():
    asked = []

    async def make(prompt_id, weights):
        asked.append(prompt_id)
        raise GroupFailed("it broke", scoring=True)

    with pytest.raises(RewardError) as raised:
        await stream_of(make, attempts=3).next_batch(1, version=0)
    assert raised.value.message == "3 prompts in a row could not be scored, last p002: it broke"
    assert raised.value.hint == "the scorer's log"
    assert asked == ORDER[:3]


@pytest.mark.parametrize("order", [ORDER, ORDER[::-1], ORDER[:2]])
async def test_one_that_can_not_be_scored_is_left_out_where_that_is_allowed(order):
    """A held-out prompt's greedy completion is the same each time, and a run of a week halted for it at its end."""
    asked = []

    async def make(prompt_id, weights):
        asked.append(prompt_id)
        await some_turns()
        if prompt_id == "p001":
            raise GroupFailed("it broke", scoring=True)

    stream = stream_of(make, order=order, attempts=3, may_leave_out=True)
    batch = await stream.next_batch(len(order), version=0)
    assert sorted(batch.prompt_ids) == sorted({*order} - {"p001"})
    assert asked.count("p001") == 3
    assert "p001" not in stream.queue.in_flight
    assert (batch.failed, batch.unscored) == (3, 3)


@pytest.mark.parametrize("order", [ORDER, ORDER[:2], ORDER[:1]])
async def test_all_of_them_are_not_left_out(order):
    async def make(prompt_id, weights):
        await some_turns()
        raise GroupFailed("it broke", scoring=True)

    with pytest.raises(RewardError):
        await stream_of(make, order=order, attempts=3, may_leave_out=True).next_batch(len(order), version=0)


async def test_one_whose_completions_do_not_come_is_never_left_out():
    async def make(prompt_id, weights):
        await some_turns()
        if prompt_id == "p001":
            raise GroupFailed("no server")

    with pytest.raises(RolloutError):
        await stream_of(make, may_leave_out=True).next_batch(len(ORDER), version=0)


async def test_one_that_is_scored_in_between_and_a_new_batch_begin_the_count_anew():
    does = iter("--+--+++" + "--.+++")  # each of two batches meets two failures in a row, where three would end it

    async def make(prompt_id, weights):
        await some_turns()
        match next(does):
            case "-":
                raise GroupFailed("it broke", scoring=True)
            case ".":
                raise GroupFailed("a server died")

    stream = stream_of(make, attempts=3)
    first = await stream.next_batch(4, version=0)
    assert (first.failed, first.unscored, first.no_score, len(first.groups)) == (4, 4, "it broke", 4)
    stream.queue.commit(first.prompt_ids)
    last = await stream.next_batch(3, version=1)
    assert (last.failed, last.unscored, last.no_score) == (3, 2, "it broke"), "of the last that was not scored"
    assert {*first.prompt_ids, *last.prompt_ids} == {*ORDER}


@pytest.mark.parametrize(("ahead", "generating"), [(0, [3.0, 3.0]), (1, [3.0, 7.0])])
async def test_a_batch_says_how_long_it_was_waited_for_and_how_long_it_was_made(monkeypatch, ahead, generating):
    """What is made ahead is made since the batch before was returned."""
    now = 10.0
    monkeypatch.setattr(rollout_stream, "time", SimpleNamespace(monotonic=lambda: now))
    may_end = {"p000": asyncio.Event(), "p002": asyncio.Event()}

    async def make(prompt_id, weights):
        if prompt_id in may_end:
            await may_end[prompt_id].wait()

    stream, said = stream_of(make, ahead=ahead), []
    for version, event in enumerate(may_end.values()):
        waiting = asyncio.create_task(stream.next_batch(2, version=version))
        await asyncio.sleep(0)
        now += 3.0
        event.set()
        batch = await waiting
        stream.queue.commit(batch.prompt_ids)
        said.append((batch.seconds, batch.generating_s))
        now += 4.0
    await stream.close()
    assert said == [(3.0, seconds) for seconds in generating]


@pytest.mark.parametrize("ahead", [0, 1])
async def test_newer_weights_than_the_step_s_are_taken_only_of_what_is_made_ahead(ahead):
    seen = []

    async def make(prompt_id, weights):
        seen.append((weights.oldest, weights.newest and weights.newest()))

    stream = stream_of(make, ahead=ahead, newest=lambda: 5)
    await stream.next_batch(2, version=4)
    await stream.close()
    assert {*seen} == {(4, 5 if ahead else None)}


SAMPLES = 8
GATE = GateRules(settings=GateConfig(), is_exact=True, versions_behind=0)


@pytest.mark.parametrize(
    ("scoring", "failed_share", "admitted", "cause"), [(False, 0.8, False, Cause.SERVER_CRASH), (True, 0.0, True, None)]
)
async def test_the_gate_compares_failed_requests_with_requests_whatever_the_number_of_samples(
    scoring, failed_share, admitted, cause
):
    """Divided by completions, 16 failed of 20 requests were a third, and the batch was trained on. A request whose
    completions no reward function could score is not one that a server failed."""
    tries = Counter()

    async def make(prompt_id, weights):
        tries[prompt_id] += 1
        if tries[prompt_id] <= 4:
            raise GroupFailed("it broke", scoring=scoring)

    stream = stream_of(make, order=ORDER[:4], n_samples=SAMPLES, attempts=20)
    batch = await stream.next_batch(4, version=0)
    report = BatchReport.of(batch, policy_version=0, n_samples=SAMPLES)
    decision = admit(report, GATE)
    assert (batch.failed, tries.total(), len(batch.rollouts)) == (16, 20, 4 * SAMPLES)
    assert (report.failed_share, decision.admitted, decision.cause) == (failed_share, admitted, cause)


async def test_requests_that_were_completed_for_later_batches_count_beside_those_that_failed_for_them():
    """Three of six requests fail while the first two groups are waited for: of all requests that is half."""
    fails = {*ORDER[3:]}

    async def make(prompt_id, weights):
        if prompt_id in fails:
            fails.remove(prompt_id)
            raise GroupFailed("it broke")

    stream = stream_of(make, concurrent=6, ahead=2)
    batch = await stream.next_batch(2, version=0)
    await stream.close()
    assert (batch.failed, len(batch.groups)) == (3, 2)
    assert BatchReport.of(batch, policy_version=0, n_samples=1).failed_share == 0.5


async def test_requests_that_were_completed_before_count_with_the_batch_that_they_make():
    """A prompt fails, and every group of the batch that takes its place was made in time for the batch before."""
    held = {}

    async def make(prompt_id, weights):
        if prompt_id == "p002" and prompt_id not in held:
            held[prompt_id] = asyncio.Event()
            await held[prompt_id].wait()
            raise GroupFailed("it broke")

    stream = stream_of(make, concurrent=6, ahead=2)
    first = await stream.next_batch(2, version=0)
    stream.queue.commit(first.prompt_ids)
    held["p002"].set()
    second = await stream.next_batch(2, version=1)
    await stream.close()
    assert (second.failed, second.prompt_ids) == (1, ("p003", "p004"))
    report = BatchReport.of(second, policy_version=1, n_samples=1)
    assert admit(report, dataclasses.replace(GATE, versions_behind=2)).admitted
