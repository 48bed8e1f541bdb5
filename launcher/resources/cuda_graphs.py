"""How many sequences a server decodes at once, for which it has CUDA graphs, and what SGLang reckons these to take.

By itself SGLang goes by the GPU's memory: 24 sequences on 24 GB, 256 on 80 GB. Above that a decode step launches each
kernel by itself; far below it, graphs are captured that nobody uses.
"""

from __future__ import annotations

import dataclasses

from launcher.config.schema import RunConfig, SGLangConfig

MIB = 2**20
LARGEST = 1024
"""Of larger batches none: these take 2 GiB by SGLang's own estimate, and what more would save was not measured."""
SEQUENCE_MIB, PREFILL_MIB = 2, 8
"""For each sequence of the largest batch, and each size of a prefill (sglang 0.5.17, `reserve_for_graph_mb`)."""


def sequences_at_once(config: RunConfig) -> int:
    """A server's part of the completions in flight; of each copy of its weights, where it has several (dp_size).

    When a server is lost, the others have its part too, and decode the excess without a graph. What has no room in the
    KV cache SGLang leaves out itself.
    """
    sglang = config.sglang
    in_flight = config.rollout.max_concurrent_rollouts * config.gconfig.n_samples
    each = -(-in_flight // (sglang.n_servers * sglang.dp_size))
    return min(each, LARGEST, sglang.max_running_requests or LARGEST)


def with_graphs(config: RunConfig) -> SGLangConfig:
    """A server's settings, with the largest batch that has a graph; one that is set stays."""
    largest = config.sglang.cuda_graph_max_bs_decode or sequences_at_once(config)
    return dataclasses.replace(config.sglang, cuda_graph_max_bs_decode=largest)


def graph_bytes(config: RunConfig, prefill_chunk: int) -> int:
    """As SGLang reserves it. `prefill_chunk`: tokens of the largest prefill."""
    largest = with_graphs(config).cuda_graph_max_bs_decode or 0
    return (SEQUENCE_MIB * largest + PREFILL_MIB * prefill_sizes(prefill_chunk)) * MIB


def prefill_sizes(most: int) -> int:
    """How many sizes SGLang captures up to `most` tokens (`_generate_prefill_cuda_graph_batch_sizes`)."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, most + 1, 512))
    return sum(size <= most for step in steps for size in range(*step))
