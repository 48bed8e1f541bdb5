"""Benchmark `rollout`: tokens/s of our rollouts against plain clients of the same server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from actors.serving.sglang_client import Sampling
from launcher.base.rollouts import Prompt
from launcher.config.compose import compose
from scripts.benchmark.experiment import PRESET
from scripts.benchmark.generation import (
    Batch,
    Block,
    add_arguments,
    measure,
    our_client,
    plain_clients,
    prompts_of,
    ratios_of,
    result,
    speeds_of,
)
from scripts.benchmark.plain_clients import Client
from scripts.benchmark.ratios import spread
from scripts.benchmark.server import running_server

__all__ = ["add_arguments", "run"]
OURS = "ours"
ONLY_WHEN_WHOLE = "ours, not in parts"


def run(arguments: argparse.Namespace) -> dict[str, object]:
    config = compose([PRESET, *arguments.overrides])
    prompts = prompts_of(config)
    sampling, n = Sampling.from_config(config.gconfig).parameters(), config.gconfig.n_samples
    with ExitStack() as stack:
        server, keys = stack.enter_context(running_server(config))
        ours = stack.enter_context(our_client(config, prompts, keys))
        in_whole = replace(config, rollout=replace(config.rollout, stream_interval=config.gconfig.max_new_tokens))
        not_in_parts = stack.enter_context(our_client(in_whole, prompts, keys))
        session, raw, call = stack.enter_context(plain_clients(keys.api))

        def plain(client: Client) -> Batch:
            def generate(wanted: Sequence[Prompt]) -> int:
                return call(client(server.url, [prompt.token_ids for prompt in wanted], n, sampling))

            return generate

        contestants = {
            OURS: ours.batch(ours.pool([server])),
            ONLY_WHEN_WHOLE: not_in_parts.batch(not_in_parts.pool([server])),
            "request a sample, by hand": plain(raw.one_by_one),
            "request a sample": plain(session.one_by_one),
            "request a prompt": plain(session.one_each),
            "request a batch": plain(session.one_for_all),
            "request a batch with n": plain(session.one_with_n),
        }
        sizes = {"rounds": arguments.rounds, "batches": arguments.batches}
        return report(measure(config, prompts, contestants, [server], keys, **sizes))


def report(blocks: Sequence[Block]) -> dict[str, object]:
    """Prints and returns: medians of each, and ours over each plain client, the fastest of which is the measure."""
    speeds = speeds_of(blocks)
    by_speed = sorted(speeds, key=lambda name: -median(speeds[name]))
    found = ratios_of(speeds, [(OURS, name) for name in speeds if name != OURS])
    ratios = {name: ratio for (_, name), ratio in found.items()}
    print(f"\n{'':26} {'tokens/s':>34}   ours over it   CPU µs a token: client, server")
    for name in by_speed:
        own = [block for block in blocks if block.contestant == name]
        tokens = sum(block.tokens for block in own)
        client = 1e6 * sum(block.client_cpu_s for block in own) / tokens
        server = 1e6 * sum(block.server_cpu_s for block in own) / tokens
        shown = spread(speeds[name], digits=0)
        print(f"{name:26} {shown:>34}   {ratios.get(name, '')!s:26} {client:7.0f} {server:7.0f}")
    fastest = next(name for name in by_speed if name not in (OURS, ONLY_WHEN_WHOLE))
    print(f"\nours over the fastest plain client ({fastest}): {ratios[fastest]}")
    return {"fastest_plain_client": fastest, **result(blocks, ratios)}
