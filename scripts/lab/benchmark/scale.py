"""Benchmark `scale`: the real monitor, Coordinator, plan and pool with 10, 100 and 1,000 simulated servers, and the
real control of 8 and 64 trainer ranks.

Simulated is what a server is seen by: its process tree, and one stand-in that answers the probes of all. So the
figures are what the launcher's own processes spend. A server that "dies" is gone from its simulated tree. The ranks
beside the first are one actor that answers for all of them; the calls to it are Ray's.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

import psutil
import ray

from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.monitor_view import Watched
from actors.monitoring.reward_series import RewardSeries
from actors.rollout.server_pool import ServerPool
from actors.serving.remote_process_probe import RemoteProcessTree
from actors.serving.sglang_client import SGLangClient
from actors.supervision.coordinator import Coordinator
from actors.supervision.interfaces import Facts
from actors.supervision.run_history import RunHistory
from launcher.base.messages import Cause, Health, ServerInfo, ServerState, TrainerView, Verdict
from launcher.base.rank_location import RankLocation
from launcher.config.compose import compose
from launcher.config.schema import RunConfig
from launcher.policy.actions import Action, AdmitServer, LoadWeights, RestartServer
from launcher.policy.memory_backoff import MemorySettings
from launcher.policy.observation_history import ProcessLook
from launcher.policy.observed import Observed, ServerFacts, TrainerFacts
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_memory import MemoryFile, RunMemory
from scripts.faults.started_run import PRESET
from scripts.lab.benchmark.made_data.simulated_ranks import SimulatedController, SimulatedRanks, running_ray
from scripts.lab.benchmark.measured import Measured
from scripts.lab.benchmark.server import STAND_IN
from scripts.running_server import running_server

if TYPE_CHECKING:
    from actors.model.model_part import ModelPart

ALIVE = Verdict(health=Health.HEALTHY, reason="made a token 0.1 s ago")
CRASHED = Verdict(health=Health.DEAD, reason="exited with -9", cause=Cause.SERVER_CRASH)
VERSION = 41
ORDERS = 50
WRITTEN_S = 1.0
"""After a loss was told, until it is in the journal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 100, 1000], help="sizes of the fleet")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the monitor observes each fleet")
    parser.add_argument("--kills", type=int, default=10, help="servers, and ranks, that die, one after the other")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8, 64], help="sizes of the trainer")


def run(arguments: argparse.Namespace) -> Measured:
    """A column for each size of the fleet, and of the trainer."""
    config = compose([PRESET, *arguments.overrides])
    rows = []
    for n in arguments.servers:
        with tempfile.TemporaryDirectory() as folder, running_server(config, entry=STAND_IN) as (server, keys):
            row: dict[str, float] = {"servers": n}
            row |= asyncio.run(pool_costs(n))
            row |= asyncio.run(coordinator_costs(n, config, Path(folder)))
            row |= asyncio.run(
                monitor_costs(n, config, Path(folder), server.url, keys, arguments.seconds, arguments.kills)
            )
        rows.append(row)
    with running_ray() if arguments.ranks else nullcontext():
        trainers = [rank_costs(n, config, arguments.seconds, arguments.kills) for n in arguments.ranks]
    return Measured(points={}, notes=[*table(rows), *table(trainers)], raw=[*rows, *trainers])


def table(columns: Sequence[Mapping[str, float]]) -> list[str]:
    names = dict.fromkeys(name for column in columns for name in column)
    shown = [[f"{column[name]:,.3g}" if name in column else "" for column in columns] for name in names]
    return [f"{name:48}" + "".join(f"{one:>12}" for one in row) for name, row in zip(names, shown, strict=True)]


def fleet(n: int, url: str = "http://127.0.0.1:9") -> list[ServerInfo]:
    ready = {"state": ServerState.READY, "weight_version": VERSION, "url": url, "generation": 0}
    return [ServerInfo(name=f"server-{i}", index=i, pid=i + 2, node="elsewhere", **ready) for i in range(n)]  # type: ignore[arg-type]


# ── the pool ──


async def pool_costs(n: int) -> dict[str, float]:
    """A request's way in and out, with four requests of eight samples in flight on each server."""

    async def probe(url: str) -> int | None:
        return None

    pool = ServerPool(probe)
    servers = fleet(n)
    began = time.process_time()
    await pool.update(servers)
    updated = time.process_time() - began
    release = asyncio.Event()

    async def request(i: int) -> None:
        async with pool.acquire(VERSION, samples=8, prompt=f"p{i}"):
            await release.wait()

    waiting = [asyncio.create_task(request(i)) for i in range(4 * n)]
    began = time.process_time()
    while sum(pool.in_flight().values()) < len(waiting):
        await asyncio.sleep(0)
    acquired = (time.process_time() - began) / len(waiting)
    spread = max(pool.in_flight().values()) - min(pool.in_flight().values())
    began = time.process_time()
    release.set()
    await asyncio.gather(*waiting)
    released = (time.process_time() - began) / len(waiting)
    await pool.close()
    return {
        "pool: news of all servers, ms": 1e3 * updated,
        "pool: a request's way in, µs": 1e6 * acquired,
        "pool: its way out, µs": 1e6 * released,
        "pool: most less least requests of a server": float(spread),
    }


# ── the Coordinator ──


class SimulatedFleet:
    """A ClusterInterface to servers that are restarted, loaded and admitted at once."""

    def __init__(self, n: int, config: RunConfig) -> None:
        ready = {"state": ServerState.READY, "verdict": ALIVE, "weight_version": VERSION, "lineage": 1}
        self.servers = {f"server-{i}": ServerFacts(name=f"server-{i}", **ready) for i in range(n)}  # type: ignore[arg-type]
        self.trainer = TrainerFacts(
            verdict=ALIVE, is_loaded=True, is_paused=False, policy_version=VERSION, lineage=1, next_step=VERSION
        )
        self.memory = MemorySettings.of(config, longest_sequence=100, on_gpu=False, shares_gpu=False)
        self.changed = asyncio.Event()

    def kill(self, name: str) -> None:
        gone = {"weight_version": None, "lineage": None}
        self.servers[name] = replace(self.servers[name], state=ServerState.DEAD, verdict=CRASHED, **gone)  # type: ignore[arg-type]

    async def begin(self) -> None:
        return

    async def look(self, *, with_checkpoints: bool = False) -> Observed:
        return Observed(servers=tuple(self.servers.values()), trainer=self.trainer, checkpoints=(), memory=self.memory)

    def deadline_s(self, action: Action) -> float:
        return 60.0

    async def perform(self, action: Action) -> Facts:
        match action:
            case RestartServer(name=name):
                self.servers[name] = replace(self.servers[name], state=ServerState.STALE, verdict=ALIVE)
            case LoadWeights(name=name, version=version, lineage=lineage):
                self.servers[name] = replace(self.servers[name], weight_version=version, lineage=lineage)
            case AdmitServer(name=name):
                self.servers[name] = replace(self.servers[name], state=ServerState.READY)
        return {}

    async def close(self) -> None:
        return


async def coordinator_costs(n: int, config: RunConfig, folder: Path) -> dict[str, float]:
    """Of a turn: all healthy; then one dies, and a tenth at once. And the turns until all serve again."""
    config = replace(config, sglang=replace(config.sglang, n_servers=n))
    path = folder / "events.jsonl"
    memory = MemoryFile(folder / "memory.json")
    history = RunHistory(Journal(path, 1, in_background=True), RunMemory(attempt=1), memory)
    simulated = SimulatedFleet(n, config)
    coordinator = Coordinator(config, simulated, history)
    history.begin()
    for _ in range(5):
        await turn(coordinator)
    quiet = [await turn(coordinator) for _ in range(50)]
    await history.flush()
    before = sum(1 for _ in read_lines(path))
    found: dict[str, float] = {"Coordinator: a turn while all is well, ms": 1e3 * median(quiet)}
    for name, dead in (("one dies", range(1)), ("a tenth dies", range(1, 1 + max(n // 10, 1)))):
        for i in dead:
            simulated.kill(f"server-{i}")
        turns = [await turn(coordinator)]
        while any(server.state is not ServerState.READY for server in simulated.servers.values()):
            turns.append(await turn(coordinator))
        found[f"Coordinator: longest turn where {name}, ms"] = 1e3 * max(turns)
        found[f"Coordinator: turns until all serve, {name}"] = float(len(turns))
    await history.flush()
    events = sum(1 for _ in read_lines(path)) - before
    return found | {"Coordinator: events for each server that died": events / (1 + max(n // 10, 1))}


async def turn(coordinator: Coordinator) -> float:
    """Its seconds; what it began ends before the next."""
    began = time.process_time()
    await coordinator.turn()
    seconds = time.process_time() - began
    await asyncio.sleep(0.02)
    return seconds


# ── the monitor ──


class SimulatedTree:
    """The processes of one server on another node, which work and make tokens until they are gone."""

    def __init__(self) -> None:
        self.gone_at: float | None = None

    def is_gone(self) -> bool:
        return self.gone_at is not None

    def look(self) -> Mapping[str, ProcessLook]:
        return {"http": ProcessLook(state="S", cpu_s=time.process_time())}

    def pids(self) -> dict[str, int]:
        return {"http": 1}

    def tokens(self) -> int:
        return int(time.monotonic() * 100)

    async def close(self) -> None:
        return


async def monitor_costs(
    n: int, config: RunConfig, folder: Path, url: str, keys: ServerKeys, seconds: float, kills: int
) -> dict[str, float]:
    trees = {f"server-{i}": SimulatedTree() for i in range(n)}
    path = folder / "monitor.jsonl"
    journal = Journal(path, 1, in_background=True)
    memory, process = psutil.Process().memory_info().rss, psutil.Process()
    async with SGLangClient(keys) as client:
        monitor = HealthMonitor(
            config,
            journal,
            client,
            series=RewardSeries(),
            far=lambda server: cast(RemoteProcessTree, trees[server.name]),
        )
        targets = [Watched(server=server, waiting=4, task=None) for server in fleet(n, url)]
        victims = random.Random(n).sample(sorted(trees), min(kills, n))
        began, cpu, views = time.monotonic(), time.process_time(), []
        while (passed := time.monotonic() - began) < seconds:
            monitor.watch(targets)
            look = time.process_time()
            monitor.view()
            views.append(time.process_time() - look)
            if victims and passed > seconds / 2:
                trees[victims.pop()].gone_at = time.monotonic()
            await asyncio.sleep(seconds / 2 / (kills + 1) if passed > seconds / 2 else 0.25)
        spent = time.process_time() - cpu
        healthy = sum(server.verdict.health is Health.HEALTHY for server in monitor.view().servers)
        await monitor.close()
    await journal.flush()
    died = {str(line["subject"]): float(str(line["at"])) for line in read_lines(path) if line["event"] == "health.dead"}
    events = sum(1 for _ in read_lines(path))
    late = [died[name] - tree.gone_at for name, tree in trees.items() if tree.gone_at is not None and name in died]
    gone = sum(tree.gone_at is not None for tree in trees.values())
    return {
        "monitor: processor time, % of one": 100 * spent / seconds,
        "monitor: of it for each server, %": 100 * spent / seconds / n,
        "monitor: memory for each server, KiB": (process.memory_info().rss - memory) / n / 1024,
        "monitor: a view of all, ms": 1e3 * median(views),
        "monitor: death until it is noticed, median ms": 1e3 * median(late),
        "monitor: the latest, ms": 1e3 * max(late),
        "monitor: deaths not noticed": float(gone - len(late)),
        "monitor: alive and not called healthy": float(n - gone - healthy),
        "monitor: events for each server": events / n,
    }


# ── the ranks of a trainer ──


class Part:
    """Of rank 0: does nothing, so that what is left is the order to the others."""

    def run(self, which: int, index: int) -> None:
        return


def rank_costs(n: int, config: RunConfig, seconds: float, kills: int) -> dict[str, float]:
    """What rank 0 spends on `n - 1` others; where there is none, what a process with a connection to Ray spends."""
    config = replace(config, actor=replace(config.actor, dp_size=n))
    process, ranks = psutil.Process(), SimulatedRanks.remote()  # type: ignore[attr-defined]
    ray.get(ranks.answer.remote(0))
    view = TrainerView(pid=1, ranks=tuple(RankLocation(node="0" * 56, pid=rank) for rank in range(1, n)))
    found: dict[str, float] = {"ranks": n, "a view of the trainer, KiB": len(pickle.dumps(view)) / 1024}
    if n == 1:
        return found | {"watching them, % of a processor": 100 * processor_s(partial(time.sleep, seconds)) / seconds}
    import torch  # noqa: F401  # as rank 0 has

    memory, late = process.memory_info().rss, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        journal = Journal(path, 1, in_background=True)
        for kill in range(max(kills, 1)):
            controller = SimulatedController(ranks, config, journal)
            controller.prepare()
            controller.begin(config, ())
            if kill == 0:
                watching = processor_s(partial(time.sleep, seconds))
                began, spent = time.monotonic(), processor_s(partial(orders, controller, n))
                took = time.monotonic() - began
                used = process.memory_info().rss - memory
            late.append(controller.lose(1 + kill % (n - 1)))
            controller.close()
        time.sleep(WRITTEN_S)
        asyncio.run(journal.flush())
        events = sum(1 for _ in read_lines(path))
    ray.kill(ranks)
    return found | {
        "watching them, % of a processor": 100 * watching / seconds,
        "an order to all, ms of a processor": 1e3 * spent / ORDERS,
        "an order to all, ms": 1e3 * took / ORDERS,
        "memory for them, KiB": used / 1024,
        "a rank's failure until it is told, median s": median(late),
        "the latest, s": max(late),
        "events for each loss": events / len(late),
    }


def orders(controller: SimulatedController, n: int) -> None:
    for _ in range(ORDERS):
        controller.together(cast("ModelPart", Part()), "run", [(0, 0)] * n)


def processor_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
