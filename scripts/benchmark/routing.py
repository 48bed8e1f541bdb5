"""Benchmark `routing`: tokens/s of two servers behind our pool against the same two driven directly, in one run.

    direct   a plain client for each server (the fastest way of asking, plain_clients.py), each with half of the prompts
    halves   our rollouts, each server in a separate pool, each with half of the prompts: all we do, without routing
    ours     our rollouts through one pool of both
    joining  the same while a third server joins: it is sent weights, generates, gets traffic, and leaves at the end

With `--stand-in` the servers make tokens at a set pace and hardly use the processor, so that what is left is the cost
of routing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import Sampling
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.messages import ServerInfo, ServerState
from launcher.base.rollouts import Prompt
from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from scripts.benchmark import generation
from scripts.benchmark.generation import Batch, OurClient, measure, measured, our_client, plain_clients, prompts_of
from scripts.benchmark.measured import Measured
from scripts.benchmark.plain_clients import AiohttpClient
from scripts.benchmark.server import STAND_IN, running_server
from scripts.faults.started_run import PRESET

DIRECT, HALVES, OURS, JOINING = "direct", "halves", "ours", "joining"
SET_PACE = (*STAND_IN, "--seconds-per-token", "0.01")
DRAIN_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    generation.add_arguments(parser)
    parser.add_argument("--stand-in", action="store_true", help="servers that make tokens at a set pace; one joins")


def run(arguments: argparse.Namespace) -> Measured:
    """Joining only among stand-ins: the start of a real third server would take its processors from the other two."""
    config = compose([PRESET, *arguments.overrides])
    prompts = prompts_of(config)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        entry = SET_PACE if arguments.stand_in else None
        served = [
            stack.enter_context(running_server(config, index=index, entry=entry, folder=folder))
            for index in range(3 if arguments.stand_in else 2)
        ]
        servers, keys = [server for server, _ in served], served[0][1]
        ready = [dataclasses.replace(server, state=ServerState.READY) for server in servers]
        ours = stack.enter_context(our_client(config, prompts, keys))
        session, _, call = stack.enter_context(plain_clients(keys.api))
        together = ours.pool(ready[:2])
        contestants = {
            DIRECT: lambda wanted: call(directly(config, session, servers[:2], wanted)),
            HALVES: halves(config, ours, ready[:2]),
            OURS: ours.batch(together),
        }
        if len(ready) > 2:
            contestants[JOINING] = while_joining(config, ours, together, ready[2])
        sizes = {"rounds": arguments.rounds, "batches": arguments.batches}
        blocks = measure(config, prompts, contestants, servers, keys, **sizes)
    return measured(blocks, [(OURS, DIRECT), (OURS, HALVES), (JOINING, OURS)])


# ── contestants ──


async def directly(
    config: RunConfig, session: AiohttpClient, servers: Sequence[ServerInfo], prompts: Sequence[Prompt]
) -> int:
    sampling, n = Sampling.from_config(config.gconfig).parameters(), config.gconfig.n_samples
    asking = (
        session.one_each(server.url, [prompt.token_ids for prompt in half], n, sampling)
        for server, half in zip(servers, (prompts[::2], prompts[1::2]), strict=True)
    )
    return sum(await asyncio.gather(*asking))


def halves(config: RunConfig, ours: OurClient, servers: Sequence[ServerInfo]) -> Batch:
    engines = [ours.engine(ours.pool([server])) for server in servers]

    async def generate(prompts: Sequence[Prompt]) -> int:
        asking = (
            engine.collect(
                generation.queue_of(half),
                ours.by_id,
                want=len(half),
                n_samples=config.gconfig.n_samples,
                sampling=Sampling.from_config(config.gconfig),
                weight_version=0,
                concurrent_prompts=max(1, config.rollout.max_concurrent_rollouts // 2),
            )
            for engine, half in zip(engines, (prompts[::2], prompts[1::2]), strict=True)
        )
        return sum(batch.generated_tokens for batch in await asyncio.gather(*asking))

    return lambda prompts: ours.thread.call(generate(prompts))


def while_joining(config: RunConfig, ours: OurClient, pool: ServerPool, third: ServerInfo) -> Batch:
    """As a run has it: weights first, then a question, then traffic."""
    batch, a_prompt = ours.batch(pool), next(iter(ours.by_id.values()))

    async def join() -> None:
        publisher = WeightPublisher(
            ours.client,
            pool,
            folders=None,
            weights=lambda: {"w": torch.zeros(3)}.items(),
            tp_size=1,
            timeout_s=config.actor.weight_update_timeout,
        )
        await publisher.send_to(third, await publisher.prepare(0), 0)
        sampling = dataclasses.replace(Sampling.from_config(config.gconfig), max_new_tokens=8)
        await ours.client.generate(third.url, token_ids=a_prompt.token_ids, sampling=sampling, timeout_s=DRAIN_S)
        await pool.update([dataclasses.replace(third, state=ServerState.READY, weight_version=0)])

    def generate(prompts: Sequence[Prompt]) -> int:
        joining = ours.thread.submit(join())
        tokens = batch(prompts)
        joining.result()
        assert ours.thread.call(pool.drain(third.name, within_s=DRAIN_S)) == 0
        return tokens

    return generate
