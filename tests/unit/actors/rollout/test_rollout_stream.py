"""Batches made ahead of the trainer: in the order of taking, of weights that are young enough, each prompt once."""

import asyncio
import functools
import json
from collections import Counter

import pytest

from actors.data.prompt_queue import PromptQueue
from actors.rollout.rollout_stream import RolloutStream
from actors.serving.completions import joined
from launcher.base.rollouts import Rollout, RolloutGroup
from tests.support.replay import prompts
from tests.support.worlds.rollout import PROMPTS, SAMPLES, WANT, World, epochs_of, part


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_whatever_happens_tokens_are_young_of_the_right_weights_and_each_prompt_is_trained_on_once(seed, ahead):
    world = World(seed, ahead)
    while world.version < 30:
        if await world.step() and world.draw.random() < 0.3:
            world.saved = world.state()
        if world.draw.random() < 0.1:
            await world.restore()
    await world.stream.close()
    epochs, met = epochs_of(world.trained)
    assert len(epochs) == 5
    assert all(Counter(epoch) == Counter([*prompts(PROMPTS)]) for epoch in epochs)
    assert len(set(met)) == len(met)


@pytest.mark.parametrize(("ahead", "left"), [(0, 0), (2, 2 * WANT)])
async def test_a_batch_is_what_was_taken_first_and_so_many_batches_more_are_made_meanwhile(ahead, left):
    slow = asyncio.Event()
    world = World(1, ahead)
    order = PromptQueue([*prompts(PROMPTS)], seed=1, shuffle=True).take_prompts(PROMPTS)

    async def make(prompt, weights, tally, kept):
        if prompt.id == order[0]:
            await slow.wait()
        return await World.make(world, prompt, weights, tally, kept)

    world.draw.random = lambda: 1.0  # nothing fails
    world.stream._make = make
    world.stream._slots = asyncio.Semaphore(PROMPTS)
    waiting = asyncio.create_task(world.stream.next_batch(WANT, version=0))
    while world.made < WANT * (ahead + 1) - 1:
        await asyncio.sleep(0)
    assert not waiting.done(), "the first is missing, and no later one takes its place"
    slow.set()
    batch = await waiting
    assert list(batch.prompt_ids) == order[:WANT]
    assert list(world.queue.in_flight) == order[: WANT + left]
    await world.stream.close()


async def test_a_restored_group_is_scored_anew_and_not_made_anew_unless_its_weights_are_too_old():
    world = World(2, 1)
    world.draw.random = lambda: 1.0
    first = await world.stream.next_batch(WANT, version=0)
    while len(world.queue._kept) < 2 * WANT:
        await asyncio.sleep(0)
    world.queue.commit(first.prompt_ids)
    state, ahead = json.dumps(world.queue.state_dict()), world.queue.in_flight
    await world.stream.close()
    for version, anew in ((1, 0), (2, WANT)):
        world.queue = PromptQueue([*prompts(PROMPTS)], seed=2, shuffle=True)
        world.queue.load_state_dict(json.loads(state))
        stream = world.new_stream()
        world.made = 0
        world.version = version
        world.ancestors[version] = 0
        stream._ahead = 1 if version == 1 else 0
        await world.some_time()
        batch = await stream.next_batch(WANT, version=version)
        assert batch.prompt_ids == ahead
        made = sum(rollout.completion.weight_version == version for rollout in batch.rollouts)
        assert made == anew * SAMPLES
        await stream.close()


async def test_what_a_batch_cost_is_not_counted_again_for_the_next():
    world = World(1, 0)
    world.draw.random = lambda: 1.0  # nothing fails

    async def make(prompt, weights, tally, kept):
        tally.retried += 1
        return await World.make(world, prompt, weights, tally, kept)

    world.stream._make = make
    for _ in range(2):
        batch = await world.stream.next_batch(WANT, version=0)
        world.queue.commit(batch.prompt_ids)
        assert batch.retried == WANT


@pytest.mark.parametrize(
    ("runs", "is_used"),
    [
        ([[3]], True),
        ([[4]], True),
        ([[3, 4]], True),
        ([[2]], False),
        ([[2, 4]], False),
        ([[5]], False),
        ([[4, 5]], False),
        ([[4], [4]], False),
    ],
    ids=str,
)
async def test_what_a_state_kept_is_used_where_each_token_is_of_weights_that_its_step_may_have(runs, is_used):
    """At version 4, one batch ahead, of one sample a prompt. Newer ones than the served are of before a restore."""
    queue, given = PromptQueue(["p000"], seed=1, shuffle=False), []
    queue.keep(
        *queue.take_prompts(1), [functools.reduce(joined, [part(version, 0) for version in one]) for one in runs]
    )
    queue.load_state_dict(queue.state_dict())

    async def make(prompt, weights, tally, kept):
        given.extend(kept)
        return RolloutGroup(prompt=prompt, rollouts=(Rollout(completion=part(4, 0), text="", reward=1.0),))

    stream = RolloutStream(
        make, queue, prompts(1), n_samples=1, concurrent_prompts=1, attempts=1, scored_by="", ahead=1
    )
    await stream.next_batch(1, version=4)
    await stream.close()
    assert bool(given) is is_used


@pytest.mark.parametrize(
    ("ahead", "played", "is_kept"),
    [(0, (False, False), False), (1, (False, False), True), (1, (True, False), False), (1, (True, True), False)],
)
async def test_what_is_made_ahead_is_kept_in_the_queue_but_for_episodes(ahead, played, is_kept):
    queue = PromptQueue(["p000"], seed=1, shuffle=False)

    async def make(prompt, weights, tally, kept):
        made = (Rollout(completion=part(0, 0), text="", reward=1.0, segments=("a turn",) * one) for one in played)
        return RolloutGroup(prompt=prompt, rollouts=tuple(made))

    stream = RolloutStream(
        make, queue, prompts(1), n_samples=2, concurrent_prompts=1, attempts=1, scored_by="", ahead=ahead
    )
    await stream.next_batch(1, version=0)
    await stream.close()
    assert bool(queue.kept("p000")) is is_kept
