"""Requests whose server leaves or is gone move to another one; missing samples are asked where the prefix is cached."""

import asyncio
import dataclasses

import pytest

from actors.rollout import server_pool
from launcher.base.messages import ServerState
from tests.programs import stand_in_server
from tests.support.replay import prompts
from tests.support.worlds.rollout import QUICK, collect, engine, fault, queue_of


@pytest.mark.slow
async def test_what_a_leaving_server_is_at_moves_and_is_neither_a_failure_nor_an_attempt():
    with (
        stand_in_server.running("--seconds-per-token", "1000", "--weight-version", "0") as slow,
        stand_in_server.running("--weight-version", "0") as quick,
    ):
        items = prompts(6)
        async with engine([slow, quick]) as (rollouts, pool):
            collecting = asyncio.create_task(collect(rollouts, queue_of(items), items, 6))
            async with asyncio.timeout(60):
                while pool.in_flight()["server-0"] == 0:
                    await asyncio.sleep(0.01)
                moved = await pool.drain("server-0", within_s=0.01)
                batch = await collecting
    assert moved > 0
    assert (len(batch.groups), batch.failed, batch.retried) == (6, 0, 0)
    assert {one.completion.server for group in batch.groups for one in group.rollouts} == {quick}


@pytest.mark.slow
@pytest.mark.parametrize("word", [{"state": ServerState.DEAD}, {"generation": 1, "state": ServerState.STALE}])
async def test_what_a_machine_that_is_gone_was_at_moves_without_its_whole_deadline(monkeypatch, word):
    """No connection breaks where the machine lost its power: the round waited for rollout.request_timeout, two hours
    in the presets for a GPU, though the loss of the node was known after seconds."""
    monkeypatch.setattr(server_pool, "LET_GO_S", 0.05)
    hours = dataclasses.replace(QUICK, request_timeout=7200.0)
    with (
        stand_in_server.running("--seconds-per-token", "1000", "--weight-version", "0") as slow,
        stand_in_server.running("--weight-version", "0") as quick,
    ):
        items = prompts(6)
        async with engine([slow, quick], config=hours) as (rollouts, pool):
            collecting = asyncio.create_task(collect(rollouts, queue_of(items), items, 6))
            async with asyncio.timeout(60):
                while pool.in_flight()["server-0"] == 0:
                    await asyncio.sleep(0.01)
                await pool.update([dataclasses.replace(pool.servers()[0], **word)])
                batch = await collecting
    assert (len(batch.groups), batch.failed, batch.retried) == (6, 0, 0)
    assert {one.completion.server for group in batch.groups for one in group.rollouts} == {quick}


@pytest.mark.slow
async def test_missing_samples_are_asked_of_the_server_that_has_the_prefix(servers):
    """One answer lacks a sample's log-probs: the others are there, and so is the prefix."""
    items = prompts(1)
    async with engine(servers) as (rollouts, _):
        await fault(servers[0], {"kind": "short_logprobs", "times": 1})
        batch = await collect(rollouts, queue_of(items), items, 1)
    assert batch.retried == 1
    assert {rollout.completion.server for rollout in batch.groups[0].rollouts} == {servers[0]}
