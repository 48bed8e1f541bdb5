"""Trainer ranks beside the first that are one actor, which answers for all of them; the calls to it are Ray's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray

from actors.cluster.ray_cluster import ray_folder
from actors.ranks.rank_controller import RankController
from launcher.base.errors import TrainerError
from launcher.base.rank_location import RankLocation
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths

SLOWEST_S = 60.0


@ray.remote(num_cpus=0)
class SimulatedRanks:
    """Each is a number; one that has ended is never asked again."""

    def __init__(self) -> None:
        self._over: dict[int, asyncio.Event] = {}

    async def where(self, number: int) -> RankLocation:
        return RankLocation(node="elsewhere", pid=number)

    async def answer(self, number: int, *order: object) -> None:
        return

    async def stay(self, number: int) -> None:
        await self._over.setdefault(number, asyncio.Event()).wait()
        raise TrainerError("it was told to end")

    async def end(self, number: int) -> float:
        self._over.setdefault(number, asyncio.Event()).set()
        return time.monotonic()


class SimulatedController(RankController):
    """The real one, whose ranks are simulated."""

    numbers = itertools.count()

    def __init__(self, ranks: Any, config: RunConfig, journal: Journal) -> None:
        self._simulated = ranks
        self._numbers: list[int] = []
        super().__init__(config, RunPaths.of(config), journal, [{}] * (config.actor.dp_size - 1))

    def _new(self, options: Mapping[str, Any], *arguments: Any) -> Any:
        number = next(self.numbers)
        self._numbers.append(number)
        methods = {"where": "where", "stay": "stay", "prepare": "answer", "ping": "answer", "do": "answer"}
        remotes = {name: partial(getattr(self._simulated, its).remote, number) for name, its in methods.items()}
        return SimpleNamespace(**{name: SimpleNamespace(remote=remote) for name, remote in remotes.items()})

    def lose(self, rank: int) -> float:
        """Seconds from its failure until it is told."""
        ended_at = float(ray.get(self._simulated.end.remote(self._numbers[rank - 1])))
        assert self._is_lost.wait(SLOWEST_S)
        return time.monotonic() - ended_at

    def close(self) -> None:
        self._is_closed.set()


@contextmanager
def running_ray() -> Iterator[None]:
    folder = str(ray_folder())
    ray.init(num_cpus=1, include_dashboard=False, _temp_dir=folder, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
