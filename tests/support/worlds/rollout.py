"""An engine, a pool and a stream of completions over servers of the test's own."""

import asyncio
import contextlib
import json
import random

import aiohttp

from actors.data.prompt_queue import PromptQueue
from actors.reward.reward_pool import Score
from actors.rollout.rollout_engine import RolloutEngine
from actors.rollout.rollout_stream import GroupFailed, RolloutStream
from actors.rollout.server_pool import ServerPool, ServerRequest, ServerTurn
from actors.serving.completions import joined
from actors.serving.sglang_client import RequestFailed, Sampling, SGLangClient
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Completion, Rollout, RolloutGroup
from launcher.config.schema import GenerationConfig, RolloutConfig
from tests.support.machine import scaled
from tests.support.ready_servers import pool_of
from tests.support.replay import prompts

SAMPLING = Sampling.from_config(GenerationConfig(max_new_tokens=4))
QUICK = RolloutConfig(request_timeout=5.0, request_retries=3, retry_wait_initial=0.001, retry_wait_max=0.01)


class EveryoneIsRight:
    """A scorer whose rewards are all 1, so that a 0 could only come from somewhere else."""

    def __init__(self, fails=lambda prompt: False):
        self._fails = fails

    async def score(self, completions, prompt, *, whole_or_none=False, made=(), group=()):
        if self._fails(prompt):
            return [Score(value=None, error="it raised")] * len(completions)
        return [Score(value=1.0)] * len(completions)


@contextlib.asynccontextmanager
async def engine(urls, *, config=QUICK, scorer=None, version=0):
    async with SGLangClient() as client:

        async def probe(url):
            try:
                return (await client.model_info(url, timeout_s=2)).weight_version
            except RequestFailed:
                return None

        pool = await pool_of(urls, version=version, probe=probe)
        yield (
            RolloutEngine(
                client=client,
                pool=pool,
                scorer=scorer or EveryoneIsRight(),
                config=config,
                decode=lambda ids: [str(i) for i in ids],
            ),
            pool,
        )
        await pool.close()


async def collect(rollouts, queue, items, want, *, n_samples=8, version=0):
    return await rollouts.collect_batch(
        queue,
        items,
        want=want,
        n_samples=n_samples,
        sampling=SAMPLING,
        weight_version=version,
        concurrent_prompts=16,
    )


def queue_of(items):
    return PromptQueue([*items], seed=1, shuffle=True)


async def fault(url, body):
    async with aiohttp.ClientSession() as session, session.post(f"{url}/stand_in/fault", json=body) as response:
        response.raise_for_status()


HOLD_S = scaled(30.0)  # only a lease that never comes takes it


def server(name="server-0", index=0, *, generation=0, state=ServerState.READY, version=0):
    return ServerInfo(
        name=name, index=index, generation=generation, state=state, url=f"http://{name}", weight_version=version
    )


def pool(*, answers=None):
    """A pool whose probe answers from the list `answers`, then with its last element."""
    left = list(answers or [None])

    async def probe(url):
        return left.pop(0) if len(left) > 1 else left[0]

    return ServerPool(probe)


async def leased(servers, version, **options):
    async with asyncio.timeout(HOLD_S), servers.acquire(version, **options) as info:
        return info.name


class Asked(ServerRequest):
    """A request that is sent by its test."""

    def __init__(self, avoid=""):
        self.avoid = avoid

    async def send(self, server, heard): ...

    def is_over(self): ...


def turn(servers, version=0, *, avoid=""):
    """A server for a request that can be moved."""
    return servers.take_turn(ServerTurn(Asked(avoid)), version)


async def assert_none_is_leased(servers, version):
    waiting = asyncio.create_task(leased(servers, version))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


PROMPTS, WANT, SAMPLES = 21, 4, 2


def part(version, lineage):
    return Completion(
        token_ids=(7,), logprobs=(-1.0,), weight_version=version, finish_reason="stop", server=f"{version}/{lineage}"
    )


class World:
    """A trainer whose steps, kills and restores are drawn, and servers whose tokens say which weights made them.

    `server` of a completion names the weights of its tokens: the version, and after how many restores it was made.
    """

    def __init__(self, seed, ahead):
        self.draw = random.Random(seed)
        self.ahead = ahead
        self.version = self.lineage = self.made = 0
        self.ancestors = {0: 0}  # of the current weights: after how many restores each version was made
        self.queue = PromptQueue([*prompts(PROMPTS)], seed=seed, shuffle=True)
        self.stream = self.new_stream()
        self.saved = self.state()
        self.trained = []
        self.order = []

    def new_stream(self):
        return RolloutStream(
            self.make,
            self.queue,
            prompts(PROMPTS),
            n_samples=SAMPLES,
            concurrent_prompts=self.draw.choice([1, 3, 100]),
            attempts=100,
            scored_by="",
            ahead=self.ahead,
            newest=lambda: self.version,
        )

    async def some_time(self):
        for _ in range(self.draw.randrange(6)):
            await asyncio.sleep(0)

    async def make(self, prompt, weights, tally, kept):
        await self.some_time()
        if kept:
            completions = list(kept)
        else:
            served = weights.newest or (lambda: weights.oldest)
            begun = part(served(), self.ancestors[served()])
            await self.some_time()
            completions = [joined(begun, part(served(), self.ancestors[served()]))] * SAMPLES
            self.made += 1
        if self.draw.random() < 0.05:
            raise GroupFailed("it failed")
        return RolloutGroup(
            prompt=prompt, rollouts=tuple(Rollout(completion=one, text="", reward=1.0) for one in completions)
        )

    def state(self):
        return json.dumps(self.queue.state_dict()), self.version, dict(self.ancestors), []

    async def step(self):
        """Returns whether the step was committed."""
        batch = self.batch = await self.stream.next_batch(WANT, version=self.version)
        for group in batch.all_groups:
            for rollout in group.rollouts:
                for made in rollout.completion.server.split():
                    version, lineage = map(int, made.split("/"))
                    assert self.version - self.ahead <= version <= self.version
                    assert self.ancestors[version] == lineage, "weights that were condemned made this token"
        used = (*batch.prompt_ids, *batch.filtered_ids)
        await self.some_time()
        match self.draw.choice(["commit"] * 5 + ["reject", "pause"]):
            case "reject":
                self.queue.requeue(used)
                self.queue.abandon()
                return False
            case "pause":
                if self.draw.random() < 0.5:
                    await self.stream.close()
                self.queue.load_state_dict(self.queue.state_dict())
                return False
        self.queue.commit(used)
        self.version += 1
        self.ancestors[self.version] = self.lineage
        self.trained.append(used)
        return True

    async def restore(self):
        """To the saved state: in the same process, with and without what was being made, or in another one."""
        content, version, ancestors, _ = self.saved
        match self.draw.choice(["told", "not told", "killed"]):
            case "told":
                await self.stream.close()
            case "killed":
                await self.stream.close()
                self.queue = PromptQueue([*prompts(PROMPTS)], seed=self.queue.prompt_order.seed, shuffle=True)
                self.stream = self.new_stream()
        self.queue.load_state_dict(json.loads(content))
        self.version = version
        self.ancestors = dict(ancestors)
        self.lineage += 1
        del self.trained[version:]
        await self.some_time()


def epochs_of(trained):
    """The prompts of each whole epoch, and those of the one that has begun."""
    epochs, met = [], []
    for ids in trained:
        met += ids
        if len(met) == PROMPTS:
            epochs.append(met)
            met = []
    return epochs, met
