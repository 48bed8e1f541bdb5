"""The trainer as a Ray actor: a thin skin over `Training`.

The group `train` has one thread, on which everything that steps happens; `ctl` always answers. `__init__` does nothing
that can fail, since Ray never restarts an actor whose constructor raised. Torch is imported in the actor's process
only: the driver, which imports this module, does without and starts seconds sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from actors.lean_imports import lean_imports
from actors.ray_life import die_with_raylet
from launcher.config import RunConfig
from launcher.errors import TrainerError
from launcher.messages import ServerInfo, Snapshot, TrainerEnd, TrainerReady
from launcher.run_paths import RunPaths

if TYPE_CHECKING:
    from actors.training import Training


@ray.remote(concurrency_groups={"train": 1, "ctl": 2})  # type: ignore[call-overload]  # annotated wrongly upstream
class Trainer:
    """`start` once, then `run`; the others may be called at any time after `start`, and raise TrainerError before."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int) -> None:
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._training: Training | None = None

    @ray.method(concurrency_group="train")
    def start(self, resume_from: Path | None) -> TrainerReady:
        die_with_raylet()
        with lean_imports():
            from actors.training import Training

            self._training = Training(self._config, self._paths, self._attempt, resume_from)
        return self._training.ready()

    @ray.method(concurrency_group="train")
    def run(self) -> TrainerEnd:
        return self._begun().run()

    @ray.method(concurrency_group="ctl")
    def set_servers(self, servers: Sequence[ServerInfo]) -> None:
        self._begun().set_servers(servers)

    @ray.method(concurrency_group="ctl")
    def snapshot(self, since: int) -> Snapshot:
        return self._begun().snapshot(since)

    @ray.method(concurrency_group="ctl")
    def request_stop(self) -> None:
        self._begun().request_stop()

    @ray.method(concurrency_group="ctl")
    def close(self) -> None:
        if self._training is not None:
            self._training.close()

    def _begun(self) -> Training:
        if self._training is None:
            raise TrainerError("the trainer has not started")
        return self._training
