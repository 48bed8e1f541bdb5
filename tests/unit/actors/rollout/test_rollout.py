"""Rollouts through real HTTP servers that fail: requests move or wait, prompts come back, and nothing is scored 0."""

import asyncio
import contextlib
import dataclasses

import pytest

from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import RewardError, RolloutError
from launcher.base.messages import ServerState
from tests.programs import stand_in_server
from tests.support.fault_proxy import KINDS, FaultProxy
from tests.support.replay import prompts
from tests.support.worlds.rollout import QUICK, SAMPLING, EveryoneIsRight, collect, engine, fault, queue_of


@pytest.mark.slow
async def test_a_fifth_of_all_requests_spoiled_costs_no_prompt_and_scores_no_zero(servers):
    items = prompts(1_700)
    async with FaultProxy(servers[0], share=0.2, seed=5) as proxy, engine([proxy.url]) as (made, _):
        queue, batches = queue_of(items), []
        while queue.epoch == 0:
            batch = await collect(made, queue, items, 100, n_samples=4)
            queue.commit(batch.prompt_ids)
            batches.append(batch)
    assert proxy.requests >= 2_000
    assert set(proxy.fired) == set(KINDS)
    assert sum(proxy.fired.values()) / proxy.requests == pytest.approx(0.2, abs=0.03)
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    assert len(rollouts) == 1_700 * 4
    assert {rollout.reward for rollout in rollouts} == {1.0}
    assert all(rollout.completion.token_ids for rollout in rollouts)
    assert sorted(i for batch in batches for i in batch.prompt_ids) == sorted(items)
    assert sum(batch.retried for batch in batches) > 200


@pytest.mark.slow
async def test_samples_that_were_whole_when_the_answer_broke_off_are_kept(servers):
    items = prompts(1)
    async with engine([servers[0]]) as (rollouts, pool):
        before = await generated(servers[0])
        await fault(servers[0], {"kind": "truncated"})
        batch = await collect(rollouts, queue_of(items), items, 1)
        served, state = await generated(servers[0]) - before, pool.servers()[0].state
    assert len(batch.rollouts) == 8
    assert (batch.retried, batch.failed) == (1, 0)
    assert served == 8 + 4, "four of eight were whole"
    assert len({r.completion.logprobs for r in batch.rollouts}) == 8, "none twice"
    assert state is ServerState.READY


@pytest.mark.slow
async def test_samples_of_a_seed_are_the_same_after_a_fault_and_differ_among_themselves(servers):
    items = prompts(2)
    seeded = dataclasses.replace(SAMPLING, seed=11)

    async def collected(is_broken):
        async with engine([servers[0]]) as (rollouts, _):
            if is_broken:
                await fault(servers[0], {"kind": "truncated"})
            batch = await rollouts.collect_batch(
                queue_of(items),
                items,
                want=2,
                n_samples=8,
                sampling=seeded,
                weight_version=0,
                concurrent_prompts=1,
            )
            return [[r.completion.logprobs for r in group.rollouts] for group in batch.groups]

    whole, broken = await collected(False), await collected(True)
    assert broken == whole
    assert all(len(set(group)) == 8 for group in whole)


async def test_groups_come_in_the_order_in_which_their_prompts_were_taken(servers):
    items = prompts(32)
    async with engine(servers) as (rollouts, _):
        batch = await collect(rollouts, queue_of(items), items, 24, n_samples=2)
    assert list(batch.prompt_ids) == queue_of(items).take_prompts(24)
    assert {r.completion.server for r in batch.rollouts} == set(servers)


async def test_requests_of_a_server_that_refuses_move_to_the_other(servers):
    items = prompts(16)
    async with engine([servers[0], "http://127.0.0.1:9"]) as (rollouts, pool):
        batch = await collect(rollouts, queue_of(items), items, 16)
        states = [s.state for s in pool.servers()]
    assert {r.completion.server for r in batch.rollouts} == {servers[0]}
    assert states == [ServerState.READY, ServerState.SUSPECT]
    assert batch.failed == 0


@pytest.mark.slow
async def test_an_outage_is_waited_for_and_burns_no_retries(servers):
    items = prompts(4)
    async with engine([servers[0]], config=dataclasses.replace(QUICK, request_retries=1)) as (rollouts, pool):
        await fault(servers[0], {"kind": "refuse", "seconds": 2, "times": 1})
        batch = await collect(rollouts, queue_of(items), items, 4)
        state = pool.servers()[0].state
    assert len(batch.groups) == 4
    assert state is ServerState.READY


async def generated(url):
    async with SGLangClient() as client:
        return (await client.metrics(url, timeout_s=10))["sglang:num_requests_total"]


async def test_a_completion_of_other_weights_is_not_taken(servers):
    items = prompts(2)
    async with asyncio.timeout(20), engine([servers[0]], version=3) as (rollouts, pool):
        collecting = asyncio.create_task(collect(rollouts, queue_of(items), items, 2, version=3))
        while pool.servers()[0].state is not ServerState.STALE or any(pool.in_flight().values()):
            await asyncio.sleep(0.01)
        assert "weight version 0, not 3" in pool.servers()[0].reason
        assert not collecting.done(), "it waits for another server"
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


async def test_of_two_servers_only_the_one_with_the_right_weights_counts(servers):
    """The pool takes both for current. What the first one sends is thrown away, and asked of the other."""
    items = prompts(6)
    with stand_in_server.running("--weight-version", "3") as newer:
        async with engine([servers[0], newer], version=3) as (rollouts, pool):
            batch = await collect(rollouts, queue_of(items), items, 6, version=3)
            states, old_ones = [one.state for one in pool.servers()], await generated(servers[0])
    assert old_ones > 0, "it was asked"
    assert batch.weight_versions == (3,)
    assert {rollout.completion.server for rollout in batch.rollouts} == {newer}
    assert [len(group.rollouts) for group in batch.groups] == [8] * 6
    assert states == [ServerState.STALE, ServerState.READY]
    assert batch.retried > 0
    assert batch.generated_tokens == sum(len(r.completion.token_ids) for r in batch.rollouts)


@pytest.mark.parametrize("shown_by", ["log-probs that are not finite", "and the model has 2"])
async def test_a_server_whose_weights_are_damaged_is_asked_no_more_until_somebody_admits_it_again(servers, shown_by):
    """Asked again, it would answer the same until the prompt has failed too often."""
    items = prompts(4)
    async with engine([servers[0]]) as (rollouts, pool):
        client = rollouts._client
        if "model" in shown_by:
            client.vocabulary = 2
        else:
            await fault(servers[0], {"kind": "nan_logprobs", "times": None})
        running = asyncio.create_task(collect(rollouts, queue_of(items), items, 4))
        async with asyncio.timeout(20):
            while pool.servers()[0].state is not ServerState.STALE or any(pool.in_flight().values()):
                await asyncio.sleep(0.01)
        asked = await generated(servers[0])
        await fault(servers[0], {"kind": "nan_logprobs", "times": 0})
        client.vocabulary = None
        doubted = pool.servers()[0]
        await pool.update([dataclasses.replace(doubted, state=ServerState.READY, reason="")])
        reason, batch = doubted.reason, await running
    assert shown_by in reason
    assert asked <= 4 * 8, "each prompt was asked for once"
    assert (len(batch.groups), batch.failed) == (4, 0)


@pytest.mark.slow
async def test_a_prompt_that_always_fails_halts_with_its_name(servers):
    items = prompts(3)
    config = dataclasses.replace(QUICK, request_retries=0, prompt_attempts=2)
    async with FaultProxy(servers[0], share=1.0, seed=1) as proxy, engine([proxy.url], config=config) as (r, _):
        with pytest.raises(RolloutError, match=r"prompt p\d+ failed 2 times"):
            await collect(r, queue_of(items), items, 3)


async def test_what_could_not_be_scored_is_generated_anew_and_never_a_zero(servers):
    items = prompts(4)
    left = ["p001", "p003", "p003"]

    def fails(prompt):
        if prompt.id in left:
            left.remove(prompt.id)
            return True
        return False

    config = dataclasses.replace(QUICK, prompt_attempts=4)  # all three may fail in a row
    async with engine([servers[0]], scorer=EveryoneIsRight(fails), config=config) as (rollouts, _):
        queue = queue_of(items)
        batch = await collect(rollouts, queue, items, 4)
        queue.commit(batch.prompt_ids)
        epoch = queue.epoch
    assert batch.failed == 3
    assert not left
    assert {r.reward for r in batch.rollouts} == {1.0}
    assert epoch == 1


async def test_a_reward_function_that_always_fails_halts_and_names_the_setting(servers):
    items = prompts(4)
    with pytest.raises(RewardError, match=r"it raised[\s\S]*reward\.fn"):
        async with engine([servers[0]], scorer=EveryoneIsRight(lambda prompt: True)) as (rollouts, _):
            await collect(rollouts, queue_of(items), items, 4)


@pytest.mark.slow
async def test_what_is_in_flight_when_a_stop_comes_is_neither_committed_nor_requeued(servers):
    items = prompts(8)
    async with engine([servers[0]]) as (rollouts, _):
        await fault(servers[0], {"kind": "slow", "seconds": 30, "times": None})
        queue = queue_of(items)
        order = queue_of(items).take_prompts(8)
        task = asyncio.create_task(collect(rollouts, queue, items, 4))
        while not queue.in_flight:
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        resumed = queue_of(items)
        resumed.load_state_dict(queue.state_dict())
        assert resumed.take_prompts(8) == order
