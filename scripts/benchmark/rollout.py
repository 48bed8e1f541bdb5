"""Benchmark `rollout`: tokens/s of our rollouts against plain clients of the same server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from actors.serving.sglang_client import Sampling
from launcher.base.rollouts import Prompt
from launcher.config.compose import compose
from scripts.benchmark.generation import Batch, add_arguments, measure, measured, our_client, plain_clients, prompts_of
from scripts.benchmark.measured import Measured
from scripts.benchmark.plain_clients import Client
from scripts.benchmark.server import running_server
from scripts.faults.started_run import PRESET

__all__ = ["add_arguments", "run"]
OURS = "ours"
ONLY_WHEN_WHOLE = "ours, not in parts"


def run(arguments: argparse.Namespace) -> Measured:
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
        blocks = measure(config, prompts, contestants, [server], keys, **sizes)
    return measured(blocks, [(OURS, name) for name in contestants if name != OURS])
