"""A further trainer rank as a Ray actor: a slice of the model, and its share of each step.

Rank 0 (actors/ranks/rank_controller.py) gives each order. A rank ends with the trainer's process and with its
raylet, and when rank 0 has not pinged it for long, as behind a broken network. It is never restarted alone: all ranks
restart together. Those of a parked trainer are parked too: they have imported everything, and on a CPU they have
joined.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from actors.cluster.fencing import bind_to_cluster
from actors.model.heavy_imports import LowPriorityImport, without_collection
from actors.processes.process_tree import process_state
from launcher.base.errors import TrainerError
from launcher.base.rank_location import RankLocation
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths

if TYPE_CHECKING:
    from actors.model.learner import Learner
    from actors.model.rank_collectives import Rendezvous

LEASE_S = 120.0
"""Without a ping of rank 0, after which a rank ends. Longer than rank 0 waits for an answer."""
FORGOTTEN = 8
"""Exit code of a rank whose lease has ended."""
GONE_S = 20.0
"""How long this rank's process of the incarnation before is waited for; Ray ends it with its trainer."""
SOON_S = 0.02
NO_PROCESS = (None, "Z", "X")
"""States of /proc: none is seen, it has ended and nobody has asked how, it is just going."""

log = logging.getLogger("trainer")


# a state, a checkpoint and the weights that are published may all be written at the same time: none waits for another
@ray.remote(concurrency_groups={"work": 1, "state": 3, "ctl": 2, "life": 1})  # type: ignore[call-overload]  # annotated wrongly upstream
class TrainerRank:
    """`where`, `prepare`, `join`, then `call` and `ask`; `stay` ends when this rank can't continue."""

    def __init__(self, config: RunConfig, paths: RunPaths, rank: int, niceness: int, gpus: str) -> None:
        """`niceness`: of the imports. `gpus`: where they are another process's until this one joins, "" for Ray's."""
        bind_to_cluster(config)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        self._paths = paths
        self._rank = rank
        self._imports = LowPriorityImport("actors.model.learner", niceness)
        self._learner: Learner | None = None
        self._is_over = threading.Event()
        self._failure = ""
        self._asked_at: float | None = None
        threading.Thread(target=self._end_when_forgotten, name="lease", daemon=True).start()

    @ray.method(concurrency_group="ctl")
    def where(self) -> RankLocation:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return RankLocation(node=ray.get_runtime_context().get_node_id(), pid=os.getpid(), gpus=gpus)

    @ray.method(concurrency_group="ctl")
    def ping(self) -> None:
        self._asked_at = time.monotonic()

    @ray.method(concurrency_group="ctl")
    def hurry(self) -> None:
        """The trainer has ended while this one is being parked."""
        self._imports.hurry()

    @ray.method(concurrency_group="life")
    def stay(self) -> None:
        """Raises TrainerError with the reason when this rank can't continue."""
        self._is_over.wait()
        raise TrainerError(self._failure)

    @ray.method(concurrency_group="work")
    def prepare(self) -> None:
        """Import what takes long, before others wait for this rank."""
        handler = logging.FileHandler(self._paths.trainer_rank_log(self._rank))
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
        with without_collection():
            self._imports.run()
        log.info("rank %d: process %d", self._rank, os.getpid())

    @ray.method(concurrency_group="work")
    def join(self, config: RunConfig, rendezvous: Rendezvous, own_address: str, before: RankLocation | None) -> None:
        """Meet the others, and take the own slice of the model. `before`: this rank in the incarnation before."""
        from actors.model.learner import Learner
        from actors.model.rank_collectives import RankGroup
        from actors.model.torch_settings import training_device

        try:
            self._let_go(before)
            device = training_device(config.actor)
            group = RankGroup.join(rendezvous, self._rank, own_address=own_address, device=device)
            self._learner = Learner(
                config.actor,
                config.ref,
                temperature=config.gconfig.temperature,
                device=device,
                sources=None,
                group=group,
            )
            log.info("rank %d: one of %d on %s", self._rank, group.size, device)
        except Exception as error:
            self._fail("joining", error)
            raise

    @ray.method(concurrency_group="work")
    def call(self, order: str, *arguments: Any) -> None:
        """Carry out one order to the `Learner`; only rank 0 uses the result."""
        try:
            if self._failure or self._learner is None:
                raise TrainerError(self._failure or "this rank has not joined")
            getattr(self._learner, order)(*arguments)
        except Exception as error:
            self._fail(order, error)
            raise

    @ray.method(concurrency_group="state")
    def ask(self, order: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """What the `Learner` answers, beside `call`. A disk that refuses is rank 0's to judge: it ends no rank."""
        if self._learner is None:
            raise TrainerError("this rank has not joined")
        try:
            return getattr(self._learner, order)(*arguments, **named)
        except OSError as error:
            what = f"{error.strerror or error}, on the node of trainer rank {self._rank}"
            raise OSError(error.errno, what, error.filename) from error

    def _let_go(self, before: RankLocation | None) -> None:
        """What it holds of the GPU is free once its process is gone."""
        if before is None or before.node != ray.get_runtime_context().get_node_id():
            return
        give_up_at = time.monotonic() + GONE_S
        while _lives(before.pid):
            if time.monotonic() > give_up_at:
                log.warning("rank %d: process %d, which was this rank, lives", self._rank, before.pid)
                return
            time.sleep(SOON_S)

    def _fail(self, work: str, error: Exception) -> None:
        """Any error ends this rank: the others may be waiting in the middle of the operation."""
        log.exception("rank %d failed at %s", self._rank, work)
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        self._failure = self._failure or f"{work}: {kind}: {error}"
        self._is_over.set()

    def _end_when_forgotten(self) -> None:
        """Once it has been asked: before, rank 0 may read its data for long, and this rank holds nothing."""
        while self._asked_at is None or time.monotonic() - self._asked_at < LEASE_S:
            time.sleep(1)
        log.error("rank %d: rank 0 has not asked for %g s; this process ends", self._rank, LEASE_S)
        os._exit(FORGOTTEN)


def _lives(pid: int) -> bool:
    """Whether any of its threads does: the first is a zombie before the last has given back what they all hold."""
    try:
        threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return any(process_state(thread)[0] not in NO_PROCESS for thread in threads)
