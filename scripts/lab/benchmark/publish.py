"""Benchmark `publish`: new weights to a running server, from a folder in memory, as tensors and over a group."""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from actors.model.policy_model import PolicyModel, torch_dtype
from actors.rollout.live_rollouts import LoopThread
from actors.serving.sglang_client import SGLangClient
from actors.weights.group_sender import GroupSender
from actors.weights.weight_folders import WeightFolders
from actors.weights.weight_publisher import WeightPublisher
from launcher.base.messages import ServerInfo
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED
from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys
from scripts.faults.started_run import PRESET
from scripts.lab.benchmark.measured import Measured, Points, paired_ratio
from scripts.lab.benchmark.server import pool_of
from scripts.running_server import running_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--publishes", type=int, default=60, help="updates by each way")


def run(arguments: argparse.Namespace) -> Measured:
    found = measure(compose([PRESET, *arguments.overrides]), publishes=arguments.publishes)
    ways = [way for way in ("tensor", "xccl") if f"{way}_s" in found]
    ratios = {f"{way} over disk": paired_ratio(found[f"{way}_s"], found["disk_s"]) for way in ways}
    return Measured(points=found, ratios=ratios)


def measure(config: RunConfig, *, publishes: int) -> Points:
    """Seconds of each of so many publishes of each way, after one of each that warms up."""
    model = PolicyModel(config.actor, config.ref, temperature=config.gconfig.temperature, total_steps=1)
    with running_server(config) as (server, keys), ExitStack() as stack:
        thread = LoopThread("publisher")
        stack.callback(thread.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-", dir=MEMORY_BACKED))
        client, ways = thread.call(connect(config, model, server, keys, Path(folder)))
        stack.callback(lambda: thread.call(client.close()))
        times = Points({way: [] for way in ways})
        version = 0
        for number in range(publishes + 1):
            for way, publisher in ways.items():
                version += 1
                started = time.monotonic()
                thread.call(publisher.publish(version))
                if number:
                    times[way].append(time.monotonic() - started)
        return times


async def connect(
    config: RunConfig, model: PolicyModel, server: ServerInfo, keys: ServerKeys, folder: Path
) -> tuple[SGLangClient, dict[str, WeightPublisher]]:
    client, pool = SGLangClient(keys), await pool_of([server])
    dtype, timeout_s = torch_dtype(config.sglang.dtype), config.actor.weight_update_timeout

    def publisher(folders: WeightFolders | None = None, groups: GroupSender | None = None) -> WeightPublisher:
        return WeightPublisher(
            client,
            pool,
            folders=folders,
            weights=lambda: model.named_weights(dtype),
            tp_size=config.sglang.tp_size,
            timeout_s=timeout_s,
            groups=groups,
        )

    in_memory = WeightFolders(folder / "weights", lambda target: model.export(target, dtype))
    ways = {"disk_s": publisher(in_memory), "tensor_s": publisher()}
    if model.device == "cpu":  # a benchmark's server and model are on one GPU, where NCCL has no two ranks
        groups = GroupSender(client, device="cpu", tp_size=config.sglang.tp_size, timeout_s=timeout_s)
        ways["xccl_s"] = publisher(groups=groups)
    return client, ways
