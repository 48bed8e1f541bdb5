"""Two servers as one: tokens/s behind our pool against the same two driven directly, in one run.

    direct   a plain client for each server (the fastest way of asking, plain_clients.py), each with half of the prompts
    halves   our rollouts, each server in a pool of its own, each with half of the prompts: all we do, without routing
    ours     our rollouts through one pool of both
    joining  the same while a third server joins: it is sent weights, generates, gets traffic, and leaves at the end

A round is one block of each, in an order drawn anew; a block is some batches of fresh prompts, with the prefix caches
flushed before each. With `stand_in` the servers make tokens at a set pace and hardly use the processor, so that what is
left is the cost of routing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch
import uvloop
from transformers import AutoTokenizer

from actors.data.prompt_queue import PromptQueue
from actors.reward.reward_pool import RewardPool
from actors.rollout.live_rollouts import LiveRollouts, LoopThread
from actors.rollout.rollout_engine import RolloutEngine
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import Sampling, SGLangClient
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Prompt
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys
from scripts.benchmark.plain_clients import AiohttpClient
from scripts.benchmark.ratios import Block, paired_ratio, spread
from scripts.benchmark.rollout import Batch, flusher, prompts_of
from scripts.benchmark.server import running_server

DIRECT, HALVES, OURS, JOINING = "direct", "halves", "ours", "joining"
STAND_IN = (sys.executable, "-m", "tests.programs.stand_in_server", "--seconds-per-token", "0.01")
DRAIN_S = 60.0


def measure(config: RunConfig, *, rounds: int, batches: int, stand_in: bool) -> list[Block]:
    """The blocks of `rounds` rounds, after one round that warms everything up. Joining only among stand-ins: the start
    of a real third server would take its processors from the other two."""
    prompts, order = prompts_of(config), random.Random(config.seed)
    entry = STAND_IN if stand_in else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        served = [
            stack.enter_context(running_server(config, index=index, entry=entry, folder=folder))
            for index in range(3 if stand_in else 2)
        ]
        servers, keys = [server for server, _ in served], served[0][1]
        flushes = [stack.enter_context(flusher(server.url, keys)) for server in servers]
        contestants = dict(stack.enter_context(our_clients(config, prompts, servers, keys)))
        contestants[DIRECT] = stack.enter_context(directly(config, servers[:2], keys.api))
        fresh = cycle(prompts)
        blocks: list[Block] = []
        for number in range(-1, rounds):
            of_round = [list(islice(fresh, config.train_dataset.batch_size)) for _ in range(batches)]
            for name in order.sample(sorted(contestants), len(contestants)):
                block = measure_block(number, name, contestants[name], of_round, flushes)
                if number >= 0:
                    blocks.append(block)
                    print(f"round {number:2}  {name:10} {block.tokens_per_s:8,.0f} tokens/s", flush=True)
        return blocks


def measure_block(
    number: int, name: str, batch: Batch, batches: Sequence[Sequence[Prompt]], flushes: Sequence[Callable[[], None]]
) -> Block:
    tokens, seconds = 0, 0.0
    for prompts in batches:
        for flush in flushes:
            flush()
        started = time.monotonic()
        tokens += batch(prompts)
        seconds += time.monotonic() - started
    return Block(round=number, contestant=name, tokens=tokens, seconds=seconds)


# ── contestants ──


@contextmanager
def directly(config: RunConfig, servers: Sequence[ServerInfo], api_key: str) -> Iterator[Batch]:
    sampling, n = Sampling.from_config(config.gconfig).parameters(), config.gconfig.n_samples
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def make() -> AiohttpClient:
            return AiohttpClient(api_key)

        session = runner.run(make())

        async def ask(halves: Sequence[Sequence[Prompt]]) -> int:
            asking = (
                session.one_each(server.url, [prompt.token_ids for prompt in half], n, sampling)
                for server, half in zip(servers, halves, strict=True)
            )
            return sum(await asyncio.gather(*asking))

        yield lambda prompts: runner.run(ask((prompts[::2], prompts[1::2])))
        runner.run(session.close())


@contextmanager
def our_clients(
    config: RunConfig, prompts: Sequence[Prompt], servers: Sequence[ServerInfo], keys: ServerKeys
) -> Iterator[Mapping[str, Batch]]:
    """Rollouts as the trainer has them."""
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    by_id = {prompt.id: prompt for prompt in prompts}
    thread = LoopThread("rollouts")
    ready = [dataclasses.replace(server, state=ServerState.READY) for server in servers]

    async def client_of() -> SGLangClient:
        return SGLangClient(keys)

    async def pool_of(members: Sequence[ServerInfo]) -> ServerPool:
        async def no_probe(_: str) -> None:
            return None

        pool = ServerPool(no_probe, hold_timeout_s=config.rollout.setup_timeout)
        await pool.update(members)
        return pool

    with RewardPool(config.reward) as scorer:
        scorer.check(prompts[0])
        gc.freeze()  # as in the trainer (`lean_imports`)
        client = thread.call(client_of())
        together, *alone = [thread.call(pool_of(members)) for members in (ready[:2], ready[:1], ready[1:2])]

        def engine(pool: ServerPool) -> RolloutEngine:
            return RolloutEngine(
                client=client,
                pool=pool,
                scorer=scorer,
                config=config.rollout,
                decode=lambda ids: tokenizer.batch_decode([list(i) for i in ids], skip_special_tokens=True),
            )

        rollouts = LiveRollouts(thread, engine(together), config=config, prompts=by_id, held_out={})
        engines = [engine(pool) for pool in alone]

        def ours(wanted: Sequence[Prompt]) -> int:
            queue = PromptQueue([prompt.id for prompt in wanted], seed=0, shuffle=False)
            done = rollouts.collect(queue, want=len(wanted), weight_version=0)
            assert len(done.groups) == len(wanted) and done.failed == 0 and done.retried == 0
            return done.generated_tokens

        async def each_its_half(halves: Sequence[Sequence[Prompt]]) -> int:
            asking = (
                one.collect(
                    PromptQueue([prompt.id for prompt in half], seed=0, shuffle=False),
                    by_id,
                    want=len(half),
                    n_samples=config.gconfig.n_samples,
                    sampling=Sampling.from_config(config.gconfig),
                    weight_version=0,
                    concurrent_prompts=max(1, config.rollout.max_concurrent_rollouts // 2),
                )
                for one, half in zip(engines, halves, strict=True)
            )
            return sum(batch.generated_tokens for batch in await asyncio.gather(*asking))

        async def join(third: ServerInfo) -> None:
            """As a run has it: weights first, then a question, then traffic."""
            publisher = WeightPublisher(
                client,
                together,
                folders=None,
                weights=lambda: {"w": torch.zeros(3)},
                tp_size=1,
                timeout_s=config.actor.weight_update_timeout,
            )
            await publisher.send_to(third, await publisher.prepare(0), 0)
            sampling = dataclasses.replace(Sampling.from_config(config.gconfig), max_new_tokens=8)
            await client.generate(third.url, token_ids=prompts[0].token_ids, sampling=sampling, timeout_s=DRAIN_S)
            await together.update([dataclasses.replace(third, state=ServerState.READY, weight_version=0)])

        def while_joining(wanted: Sequence[Prompt]) -> int:
            joining = thread.submit(join(ready[2]))
            tokens = ours(wanted)
            joining.result()
            assert thread.call(together.drain(ready[2].name, within_s=DRAIN_S)) == 0
            return tokens

        found: dict[str, Batch] = {
            OURS: ours,
            HALVES: lambda wanted: thread.call(each_its_half((wanted[::2], wanted[1::2]))),
        }
        if len(ready) > 2:
            found[JOINING] = while_joining
        try:
            yield found
        finally:
            thread.call(client.close())
            thread.close()


# ── what came of it ──


def report(blocks: Sequence[Block]) -> dict[str, object]:
    """Prints and returns: medians of each, ours over the two driven directly and over halves, joining over ours."""
    names = [name for name in (DIRECT, HALVES, OURS, JOINING) if any(block.contestant == name for block in blocks)]
    speeds = {name: [block.tokens_per_s for block in blocks if block.contestant == name] for name in names}
    for name in names:
        print(f"{name:10} {spread(speeds[name], ' tokens/s', digits=0)}")
    pairs = [(OURS, DIRECT), (OURS, HALVES), (JOINING, OURS)]
    ratios = {f"{one}/{other}": paired_ratio(speeds[one], speeds[other]) for one, other in pairs if one in speeds}
    for which, ratio in ratios.items():
        print(f"{which}: {ratio}")
    return {
        "ratios": {which: dataclasses.asdict(ratio) for which, ratio in ratios.items()},
        "median_tokens_per_s": {name: median(speeds[name]) for name in names},
        "blocks": [dataclasses.asdict(block) for block in blocks],
    }
