"""Requests of a silent server move to another one, which continues them: each prompt is answered once."""

import asyncio
import contextlib
import dataclasses
from functools import partial

import aiohttp
import pytest

from actors.rollout.rollout_engine import RolloutEngine
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import RequestFailed, SGLangClient
from launcher.base.messages import ServerState
from launcher.config.schema import RolloutConfig
from tests.programs import stand_in_server
from tests.support.machine import scaled
from tests.support.ready_servers import ready
from tests.support.replay import prompts
from tests.support.worlds.rollout import SAMPLING, EveryoneIsRight, queue_of

deadline_s = partial(scaled, 60.0)
PACED = ("--weight-version", "0", "--seconds-per-token", "0.01")
CONFIG = RolloutConfig(hedge_after_s=None, stream_interval=4, retry_wait_initial=0.01, retry_wait_max=0.05)
LONG = dataclasses.replace(SAMPLING, max_new_tokens=60, min_new_tokens=60, seed=5)


@pytest.fixture
def urls():
    with stand_in_server.running(*PACED) as one, stand_in_server.running(*PACED) as two:
        yield [one, two]


async def order(url, path):
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json={"mode": "retract"}) as answer:
        answer.raise_for_status()


def silence(url):
    """It answers no more: what is asked of it waits, and what it has begun stands still."""
    return order(url, "/pause_generation")


def end_of_silence(url):
    return order(url, "/continue_generation")


class Rollouts:
    """An engine on these servers, with the events that it told."""

    def __init__(self, client, urls, config):
        async def probe(url):
            with contextlib.suppress(RequestFailed):
                made = await client.generate(
                    url, token_ids=(1,), sampling=dataclasses.replace(LONG, max_new_tokens=1), timeout_s=deadline_s()
                )
                return made.weight_version

        self.told = []
        self.urls = urls
        self.pool = ServerPool(probe)
        self.engine = RolloutEngine(
            client=client,
            pool=self.pool,
            scorer=EveryoneIsRight(),
            config=config,
            decode=lambda ids: [str(i) for i in ids],
            told=lambda *event: self.told.append(event),
        )

    async def collect(self, names):
        items = {name: prompt for name, prompt in prompts(40).items() if name in names}
        wanted = {"want": len(items), "n_samples": 2, "sampling": LONG, "weight_version": 0, "concurrent_prompts": 4}
        return await self.engine.collect_batch(queue_of(items), items, **wanted)

    async def until(self, holds):
        async with asyncio.timeout(deadline_s()):
            while not holds():
                await asyncio.sleep(0.01)

    async def until_in_the_midst(self):
        """Each server has sent some of what it was asked."""
        names = {f"server-{i}" for i in range(len(self.urls))}
        live = self.engine._loop._live
        await self.until(lambda: {turn.server.name for turn in live if live[turn].first_s is not None} == names)

    def state(self, name):
        return next(server.state for server in self.pool.servers() if server.name == name)


NAMES = [f"p{n:03d}" for n in range(40)]
EARLIER, NOW = NAMES[:16], NAMES[16:]
"""So many that they are not over before a server is silent, however late this process gets its turns."""


def run(urls, work, **changed):
    """`work(rollouts)` after some prompts from which the pace of each server is known. On a busy
    machine a sound server's tokens come late too, and it is no silent one for that."""
    config = dataclasses.replace(CONFIG, **{"hedge_after_s": scaled(0.3)} | changed)

    async def inside():
        async with asyncio.timeout(2 * deadline_s()), SGLangClient() as client:
            rollouts = Rollouts(client, urls, config)
            await rollouts.pool.update(ready(url, i) for i, url in enumerate(urls))
            await rollouts.collect(EARLIER)
            try:
                return await work(rollouts)
            finally:
                for url in urls:
                    await end_of_silence(url)
                await rollouts.pool.close()

    return asyncio.run(inside())


def assert_each_once(batch):
    assert sorted(batch.prompt_ids) == NOW
    assert [len(group.rollouts) for group in batch.groups] == [2] * len(NOW)
    assert {len(rollout.completion.token_ids) for rollout in batch.rollouts} == {60}
    assert {len(rollout.completion.logprobs) for rollout in batch.rollouts} == {60}
    assert batch.generated_tokens == 2 * 60 * len(NOW)
    assert (batch.failed, batch.retried) == (0, 0)


@pytest.mark.slow
def test_what_a_silent_server_was_asked_is_answered_by_another_from_the_tokens_that_had_arrived(urls):
    async def work(rollouts):
        running = asyncio.create_task(rollouts.collect(NOW))
        await rollouts.until_in_the_midst()
        await silence(urls[0])
        batch = await running
        state, owes = rollouts.state("server-0"), rollouts.pool.in_flight()["server-0"]
        await end_of_silence(urls[0])
        await rollouts.until(lambda: rollouts.state("server-0") is ServerState.READY)
        return batch, state, owes, rollouts.told

    batch, state, owes, told = run(urls, work)
    assert_each_once(batch)
    assert batch.hedged >= 1
    assert f"{urls[0]} {urls[1]}" in {rollout.completion.server for rollout in batch.rollouts}
    assert batch.kept_tokens > 0
    assert (state, owes) == (ServerState.SUSPECT, 1), "it gets no requests, and still owes the token of a probe"
    (event,) = (event for event in told if event[1] == "server-0")
    assert event[0] == "hedge.began"
    assert "no tokens for" in event[2]


@pytest.mark.slow
def test_a_silence_of_a_moment_costs_no_prompt_and_no_token_is_there_twice(urls):
    async def work(rollouts):
        running = asyncio.create_task(rollouts.collect(NOW))
        await rollouts.until_in_the_midst()
        await silence(urls[0])
        await rollouts.until(lambda: rollouts.told)
        await end_of_silence(urls[0])
        await rollouts.until(lambda: rollouts.state("server-0") is ServerState.READY)
        return await running

    batch = run(urls, work)
    assert_each_once(batch)
    assert batch.hedged >= 1


@pytest.mark.slow
@pytest.mark.parametrize("which", ["the only one", "all of them", "switched off"])
def test_no_server_is_suspected_where_it_would_not_help(urls, which):
    served = urls[:1] if which == "the only one" else urls
    patient_s = scaled(1.0)

    async def work(rollouts):
        running = asyncio.create_task(rollouts.collect(NOW))
        await rollouts.until_in_the_midst()
        await asyncio.gather(*map(silence, served if which != "switched off" else served[:1]))
        await asyncio.wait({running}, timeout=3 * patient_s)
        states = {server.state for server in rollouts.pool.servers()}
        for url in served:
            await end_of_silence(url)
        return await running, states, rollouts.told

    batch, states, told = run(served, work, hedge_after_s=None if which == "switched off" else patient_s)
    assert_each_once(batch)
    assert (batch.hedged, told, states) == (0, [], {ServerState.READY})
