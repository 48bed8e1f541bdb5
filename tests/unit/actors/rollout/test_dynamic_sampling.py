"""Groups without a signal are left out and replaced: each prompt is used up once per epoch, trained on or filtered."""

import asyncio
import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data.prompt_queue import PromptQueue
from actors.rollout.rollout_stream import RolloutStream
from launcher.base.rollouts import Rollout, RolloutGroup, mean_of
from launcher.policy.routing import may_take
from tests.support.replay import digits, prompts
from tests.support.worlds.rollout import PROMPTS, WANT, World, epochs_of, part


def has_signal(prompt_id, share):
    return digits(prompt_id)[0] < 256 * share


class Sampled(World):
    """A share of the prompts has a signal, whichever weights answer."""

    def __init__(self, seed, ahead, most, share):
        self.most = most
        self.share = share
        super().__init__(seed, ahead)

    def new_stream(self):
        stream = super().new_stream()
        stream._most_batches = self.most
        return stream

    async def make(self, prompt, weights, tally, kept):
        group = await super().make(prompt, weights, tally, kept)
        rewards = (0.0, 1.0) if has_signal(prompt.id, self.share) else (0.0, 0.0)
        pairs = zip(group.rollouts, rewards, strict=True)
        return dataclasses.replace(
            group, rollouts=tuple(dataclasses.replace(one, reward=reward) for one, reward in pairs)
        )

    def check_batch(self, *, is_last):
        """`is_last` of its epoch."""
        batch = self.batch
        used = len(batch.all_groups)
        assert 0 < len(batch.groups) <= WANT
        assert used <= self.most * WANT
        signals = [not group.is_flat for group in batch.all_groups]
        assert sum(signals) <= WANT
        assert signals == [place < sum(signals) for place in range(used)], "what has a signal is trained on"
        assert sum(signals) == WANT or used == self.most * WANT or is_last


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(("most", "share"), [(1, 0.5), (2, 0.5), (3, 0.2), (3, 0.0), (9, 0.3)])
async def test_whatever_happens_each_prompt_is_used_up_once_per_epoch_and_no_token_is_too_old(seed, ahead, most, share):
    world = Sampled(seed, ahead, most, share)
    while world.version < 25:
        before = world.queue.epoch
        if await world.step():
            world.check_batch(is_last=world.queue.epoch > before)
            if world.draw.random() < 0.3:
                world.saved = world.state()
        if world.draw.random() < 0.1:
            await world.restore()
    await world.stream.close()
    epochs, met = epochs_of(world.trained)
    assert len(epochs) >= 4
    assert all(Counter(epoch) == Counter([*prompts(PROMPTS)]) for epoch in epochs)
    assert len(set(met)) == len(met)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ahead", [0, 2])
async def test_which_prompts_a_step_has_does_not_depend_on_how_fast_they_are(seed, ahead):
    world = Sampled(seed, ahead, 3, 0.4)
    world.draw.random = lambda: 1.0  # nothing fails
    order = PromptQueue([*prompts(PROMPTS)], seed=seed, shuffle=True).take_prompts(PROMPTS)
    while order:
        batch = await world.stream.next_batch(WANT, version=0)
        expected = []
        while order and len(expected) < 3 * WANT and sum(has_signal(one, 0.4) for one in expected) < WANT:
            expected.append(order.pop(0))
        assert sorted((*batch.prompt_ids, *batch.filtered_ids)) == sorted(expected)
        if ahead == 0:
            assert len(world.queue.in_flight) == len(expected), "nothing is left running"
        world.queue.commit(expected)
    await world.stream.close()


@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 4), st.data())
def test_a_replacement_is_asked_for_only_where_the_next_step_needs_it(batch, ahead, most, data):
    in_flight = data.draw(st.integers(0, (ahead + most + 1) * batch))
    flat = data.draw(st.integers(0, in_flight))
    room = may_take(in_flight, batch=batch, ahead=ahead, flat=flat, most_batches=most)
    beyond = in_flight + room - (ahead + 1) * batch
    if room and beyond > 0:
        assert in_flight + room - flat <= batch
        assert in_flight + room <= most * batch
    assert room >= may_take(in_flight, batch=batch, ahead=ahead)


async def test_rewards_of_what_was_left_out_count_in_the_figures_of_the_batch():
    world = Sampled(5, 0, 3, 0.4)
    world.draw.random = lambda: 1.0
    batch = await world.stream.next_batch(WANT, version=0)
    assert batch.filtered
    assert {rollout.reward for group in batch.filtered for rollout in group.rollouts} == {0.0}
    assert len(batch.rollouts) == 2 * len(batch.all_groups)
    assert mean_of([rollout.reward for rollout in batch.rollouts]) < 0.5


class Three:
    """Prompts of which those in `flat` have no signal when they are answered, once they `may_end`."""

    def __init__(self, *, most):
        self.flat = {"p000"}
        self.may_end = asyncio.Event()
        self.queue = PromptQueue([*prompts(3)], seed=1, shuffle=False)
        more = {"n_samples": 2, "concurrent_prompts": 3, "attempts": 1, "scored_by": "", "most_batches": most}
        self.stream = RolloutStream(self.make, self.queue, prompts(3), **more)

    async def make(self, prompt, weights, tally, kept):
        if prompt.id != "p000":
            await self.may_end.wait()
        rewards = (0.0, float(prompt.id not in self.flat))
        return RolloutGroup(
            prompt=prompt, rollouts=tuple(Rollout(completion=part(0, 0), text="", reward=reward) for reward in rewards)
        )


@pytest.mark.parametrize(
    ("most", "trained", "filtered"), [(None, ("p000", "p001"), ()), (2, ("p001", "p002"), ("p000",))]
)
async def test_a_flat_group_is_trained_on_where_none_is_replaced(most, trained, filtered):
    three = Three(most=most)
    three.may_end.set()
    batch = await three.stream.next_batch(2, version=0)
    assert (batch.prompt_ids, batch.filtered_ids) == (trained, filtered)


async def test_a_prompt_that_was_flat_before_a_stop_is_judged_by_what_is_made_of_it_then():
    three = Three(most=2)
    waiting = asyncio.create_task(three.stream.next_batch(2, version=0))
    while not three.stream._flat:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    three.queue.load_state_dict(three.queue.state_dict())
    three.flat.clear()
    three.may_end.set()
    batch = await three.stream.next_batch(2, version=0)
    assert (batch.prompt_ids, batch.filtered_ids) == (("p000", "p001"), ())
