"""Tokens per second of our rollouts against plain clients: same server, prompts, sampling and concurrency.

Ours is the path of a run: `LiveRollouts.collect` from another thread, with its pool, retries, checks, decoding and
scoring. A round is one block of each contestant, in an order drawn anew; a block is some batches of fresh prompts, with
the server's prefix cache flushed before each, as new weights flush it before each step of a run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

import uvloop
from transformers import AutoTokenizer

from actors.data.dataset import build_prompts, load_records
from actors.data.prompt_queue import PromptQueue
from actors.reward.reward_pool import RewardPool
from actors.rollout.live_rollouts import LiveRollouts, LoopThread
from actors.rollout.rollout_engine import RolloutEngine
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import Sampling, SGLangClient
from launcher.base.messages import ServerInfo
from launcher.base.rollouts import Prompt
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys
from scripts.benchmark.plain_clients import AiohttpClient, Client, RawClient
from scripts.benchmark.ratios import Block, paired_ratio, spread
from scripts.benchmark.server import cpu_seconds, running_server

OURS = "ours"
Batch = Callable[[Sequence[Prompt]], int]
"""Generates the samples of some prompts; the tokens of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedBlock(Block):
    """`client_cpu_s` is this process's own time, `server_cpu_s` the server's."""

    client_cpu_s: float
    server_cpu_s: float


def measure(config: RunConfig, *, rounds: int, batches: int) -> list[CostedBlock]:
    """The blocks of `rounds` rounds, after one round that warms everything up."""
    prompts = prompts_of(config)
    order = random.Random(config.seed)
    with running_server(config) as (server, keys), ExitStack() as stack:
        flush = stack.enter_context(flusher(server.url, keys))
        contestants: dict[str, Batch] = {OURS: stack.enter_context(our_client(config, prompts, server, keys))}
        contestants |= stack.enter_context(plain_clients(config, server.url, keys.api))
        fresh = cycle(prompts)
        blocks: list[CostedBlock] = []
        for number in range(-1, rounds):
            batches_of_round = [
                list(islice(fresh, config.train_dataset.batch_size)) for _ in range(batches if number >= 0 else 1)
            ]
            for name in order.sample(sorted(contestants), len(contestants)):
                block = measure_block(number, name, contestants[name], batches_of_round, flush, server)
                if number >= 0:
                    blocks.append(block)
                    print(f"round {number:2}  {name:26} {block.tokens_per_s:8,.0f} tokens/s", flush=True)
        return blocks


def measure_block(
    number: int,
    name: str,
    batch: Batch,
    batches: Sequence[Sequence[Prompt]],
    flush: Callable[[], None],
    server: ServerInfo,
) -> CostedBlock:
    assert server.pid is not None
    tokens, seconds, client, used = 0, 0.0, 0.0, 0.0
    for prompts in batches:
        flush()
        server_before, client_before, started = cpu_seconds(server.pid), time.process_time(), time.monotonic()
        tokens += batch(prompts)
        seconds += time.monotonic() - started
        client += time.process_time() - client_before
        used += cpu_seconds(server.pid) - server_before
    return CostedBlock(
        round=number, contestant=name, tokens=tokens, seconds=seconds, client_cpu_s=client, server_cpu_s=used
    )


# ── contestants ──


@contextmanager
def our_client(config: RunConfig, prompts: Sequence[Prompt], server: ServerInfo, keys: ServerKeys) -> Iterator[Batch]:
    """Rollouts as the trainer has them."""
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    by_id = {prompt.id: prompt for prompt in prompts}
    thread = LoopThread("rollouts")

    async def connect(scorer: RewardPool) -> tuple[SGLangClient, RolloutEngine]:
        async def no_probe(_: str) -> None:
            return None

        client = SGLangClient(keys)
        pool = ServerPool(no_probe, hold_timeout_s=config.rollout.setup_timeout)
        await pool.update([server])
        engine = RolloutEngine(
            client=client,
            pool=pool,
            scorer=scorer,
            config=config.rollout,
            decode=lambda ids: tokenizer.batch_decode([list(i) for i in ids], skip_special_tokens=True),
        )
        return client, engine

    with RewardPool(config.reward) as scorer:
        scorer.check(prompts[0])
        gc.freeze()  # as in the trainer (`lean_imports`)
        client, engine = thread.call(connect(scorer))
        rollouts = LiveRollouts(thread, engine, config=config, prompts=by_id, held_out={})

        def batch(wanted: Sequence[Prompt]) -> int:
            queue = PromptQueue([prompt.id for prompt in wanted], seed=0, shuffle=False)
            done = rollouts.collect(queue, want=len(wanted), weight_version=0)
            assert len(done.groups) == len(wanted) and done.failed == 0 and done.retried == 0
            return done.generated_tokens

        try:
            yield batch
        finally:
            thread.call(client.close())
            thread.close()


@contextmanager
def plain_clients(config: RunConfig, url: str, api_key: str) -> Iterator[dict[str, Batch]]:
    """Every plain way of asking, on uvloop's loop, which is faster than asyncio's own."""
    sampling, n = Sampling.from_config(config.gconfig).parameters(), config.gconfig.n_samples
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        async def make() -> tuple[AiohttpClient, RawClient]:
            return AiohttpClient(api_key), RawClient(api_key)  # sessions belong to the loop that they are made on

        def asking(client: Client) -> Batch:
            return lambda prompts: runner.run(client(url, [prompt.token_ids for prompt in prompts], n, sampling))

        session, raw = runner.run(make())
        yield {
            "request a sample, by hand": asking(raw.one_by_one),
            "request a sample": asking(session.one_by_one),
            "request a prompt": asking(session.one_each),
            "request a batch": asking(session.one_for_all),
            "request a batch with n": asking(session.one_with_n),
        }
        runner.run(session.close())
        runner.run(raw.close())


# ── what is asked ──


def prompts_of(config: RunConfig) -> list[Prompt]:
    """The training prompts, tokenised as in a run."""
    records = load_records(config.train_dataset, key="train_dataset")
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    return build_prompts(records, tokenizer, max_prompt_tokens=None, max_length=None, key="train_dataset")[0]


@contextmanager
def flusher(url: str, keys: ServerKeys) -> Iterator[Callable[[], None]]:
    """Empties the server's prefix cache."""

    async def flush() -> None:
        async with SGLangClient(keys) as client:
            await client.flush_cache(url, timeout_s=60.0)

    with asyncio.Runner() as runner:
        yield lambda: runner.run(flush())


# ── what came of it ──


def report(blocks: Sequence[CostedBlock]) -> dict[str, object]:
    """Prints and returns: medians of each, and ours over each plain client, the fastest of which is the measure."""
    names = sorted({block.contestant for block in blocks})
    speeds = {name: [block.tokens_per_s for block in blocks if block.contestant == name] for name in names}
    by_speed = sorted(names, key=lambda name: -median(speeds[name]))
    ratios = {name: paired_ratio(speeds[OURS], speeds[name]) for name in names if name != OURS}
    print(f"\n{'':26} {'tokens/s':>34}   ours over it   CPU µs a token: client, server")
    for name in by_speed:
        own = [block for block in blocks if block.contestant == name]
        tokens = sum(block.tokens for block in own)
        client = 1e6 * sum(block.client_cpu_s for block in own) / tokens
        server = 1e6 * sum(block.server_cpu_s for block in own) / tokens
        print(
            f"{name:26} {spread(speeds[name], digits=0):>34}   {ratios.get(name, '')!s:26} {client:7.0f} {server:7.0f}"
        )
    fastest = next(name for name in by_speed if name != OURS)
    print(f"\nours over the fastest plain client ({fastest}): {ratios[fastest]}")
    return {
        "fastest_plain_client": fastest,
        "ratios": {name: dataclasses.asdict(ratio) for name, ratio in ratios.items()},
        "median_tokens_per_s": {name: median(speeds[name]) for name in by_speed},
        "blocks": [dataclasses.asdict(block) for block in blocks],
    }
