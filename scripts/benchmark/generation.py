"""Tokens per second of several clients of the same servers: same prompts, sampling and concurrency.

A round is one block of each client, in a new random order; a block is some batches of fresh prompts, with the
servers' prefix caches flushed before each, as new weights flush them before each step of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import uvloop
from transformers import AutoTokenizer

from actors.data.dataset import load_records
from actors.data.prompt_queue import PromptQueue
from actors.data.prompts import build_prompts
from actors.reward.reward_pool import RewardPool
from actors.rollout.live_rollouts import LiveRollouts, LoopThread
from actors.rollout.rollout_engine import RolloutEngine
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import SGLangClient
from launcher.base.messages import ServerInfo
from launcher.base.rollouts import Prompt
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys
from scripts.benchmark.measured import Measured, Points, paired_ratio
from scripts.benchmark.plain_clients import AiohttpClient, RawClient
from scripts.benchmark.server import cpu_seconds, pool_of

Batch = Callable[[Sequence[Prompt]], int]
"""Generates the samples of some prompts; the tokens of all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One client's part of one round. `client_cpu_s` is this process's own time, `server_cpu_s` the servers'."""

    round: int
    contestant: str
    tokens: int
    seconds: float
    client_cpu_s: float
    server_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each client")
    parser.add_argument("--batches", type=int, default=3, help="batches in a block")


def measure(
    config: RunConfig,
    prompts: Sequence[Prompt],
    contestants: Mapping[str, Batch],
    servers: Sequence[ServerInfo],
    keys: ServerKeys,
    *,
    rounds: int,
    batches: int,
) -> list[Block]:
    """The blocks of `rounds` rounds, after one round that warms everything up."""
    order, fresh = random.Random(config.seed), cycle(prompts)
    blocks: list[Block] = []
    with asyncio.Runner() as runner:
        for number in range(-1, rounds):
            of_round = [list(islice(fresh, config.train_dataset.batch_size)) for _ in range(batches)]
            for name in order.sample(sorted(contestants), len(contestants)):
                costs = [
                    _costs(contestants[name], batch, servers, lambda: runner.run(_flush(servers, keys)))
                    for batch in of_round
                ]
                tokens, seconds, client, server = (sum(figures) for figures in zip(*costs, strict=True))
                block = Block(
                    round=number,
                    contestant=name,
                    tokens=int(tokens),
                    seconds=seconds,
                    client_cpu_s=client,
                    server_cpu_s=server,
                )
                if number >= 0:
                    blocks.append(block)
                    print(f"round {number:2}  {name:26} {block.tokens_per_s:8,.0f} tokens/s", flush=True)
    return blocks


def _costs(
    batch: Batch, prompts: Sequence[Prompt], servers: Sequence[ServerInfo], flush: Callable[[], None]
) -> tuple[float, ...]:
    """Tokens, seconds, processor seconds of this process and of the servers."""

    def now() -> tuple[float, ...]:
        used = sum(cpu_seconds(server.pid) for server in servers if server.pid is not None)
        return time.monotonic(), time.process_time(), used

    flush()
    before = now()
    tokens = batch(prompts)
    return tokens, *(after - begun for after, begun in zip(now(), before, strict=True))


async def _flush(servers: Sequence[ServerInfo], keys: ServerKeys) -> None:
    async with SGLangClient(keys) as client:
        for server in servers:
            await client.flush_cache(server.url, timeout_s=60.0)


# ── contestants ──


@contextmanager
def plain_clients(api_key: str) -> Iterator[tuple[AiohttpClient, RawClient, Callable[[Coroutine[Any, Any, int]], int]]]:
    """Plain clients and what runs their calls: uvloop's loop, which is faster than asyncio's own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def make() -> tuple[AiohttpClient, RawClient]:
            return AiohttpClient(api_key), RawClient(api_key)  # sessions belong to the loop that they are made on

        session, raw = runner.run(make())
        try:
            yield session, raw, runner.run
        finally:
            runner.run(session.close())
            runner.run(raw.close())


class OurClient:
    """Rollouts as the trainer has them: in another thread, with pool, retries, checks, decoding and scoring."""

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], scorer: RewardPool, keys: ServerKeys) -> None:
        self._config = config
        self._scorer = scorer
        self._tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path, trust_remote_code=False)
        self.by_id = {prompt.id: prompt for prompt in prompts}
        self.thread = LoopThread("rollouts")
        self.client = self.thread.call(self._connect(keys))

    async def _connect(self, keys: ServerKeys) -> SGLangClient:
        return SGLangClient(keys)

    def pool(self, servers: Sequence[ServerInfo]) -> ServerPool:
        return self.thread.call(pool_of(servers))

    def engine(self, pool: ServerPool) -> RolloutEngine:
        return RolloutEngine(
            client=self.client,
            pool=pool,
            scorer=self._scorer,
            config=self._config.rollout,
            decode=lambda ids: self._tokenizer.batch_decode([list(i) for i in ids], skip_special_tokens=True),
        )

    def batch(self, pool: ServerPool) -> Batch:
        engine = self.engine(pool)
        rollouts = LiveRollouts(self.thread, engine, config=self._config, prompts=self.by_id, held_out={})

        def generate(wanted: Sequence[Prompt]) -> int:
            done = rollouts.collect(queue_of(wanted), want=len(wanted), weight_version=0)
            assert len(done.groups) == len(wanted) and done.failed == 0 and done.retried == 0
            return done.generated_tokens

        return generate

    def close(self) -> None:
        self.thread.call(self.client.close())
        self.thread.close()


@contextmanager
def our_client(config: RunConfig, prompts: Sequence[Prompt], keys: ServerKeys) -> Iterator[OurClient]:
    with RewardPool(config.reward) as scorer:
        scorer.check(prompts[0])
        gc.freeze()  # as in the trainer (`lean_imports`)
        ours = OurClient(config, prompts, scorer, keys)
        try:
            yield ours
        finally:
            ours.close()


def queue_of(prompts: Sequence[Prompt]) -> PromptQueue:
    return PromptQueue([prompt.id for prompt in prompts], seed=0, shuffle=False)


def prompts_of(config: RunConfig) -> list[Prompt]:
    """The training prompts, tokenised as in a run."""
    records = load_records(config.train_dataset, key="train_dataset")
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path, trust_remote_code=False)
    return build_prompts(records, tokenizer, max_prompt_tokens=None, max_length=None, key="train_dataset")[0]


# ── results ──


def measured(blocks: Sequence[Block], pairs: Sequence[tuple[str, str]]) -> Measured:
    """Tokens/s of each contestant round by round, and processor time; ratios of the first over the second of a pair,
    where it took part."""
    points, speeds = Points(), Points()
    for name in sorted({block.contestant for block in blocks}):
        own = [block for block in blocks if block.contestant == name]
        tokens = sum(block.tokens for block in own)
        points[f"{name}: tokens/s"] = speeds[name] = [block.tokens_per_s for block in own]
        points[f"{name}: client's CPU µs a token"] = [1e6 * sum(block.client_cpu_s for block in own) / tokens]
        points[f"{name}: server's CPU µs a token"] = [1e6 * sum(block.server_cpu_s for block in own) / tokens]
    ratios = {f"{one} ÷ {other}": paired_ratio(speeds[one], speeds[other]) for one, other in pairs if one in speeds}
    return Measured(points=points, ratios=ratios, raw=[dataclasses.asdict(block) for block in blocks])
