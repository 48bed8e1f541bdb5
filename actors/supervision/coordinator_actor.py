"""The Coordinator as a Ray actor: finds the run's other actors by name, and adopts what runs.

Ray restarts it with its constructor's arguments; whoever waits for its outcome asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.cluster.fencing import MARGIN_S, bind_to_cluster, lease_of
from actors.cluster.node_identity import this_node
from actors.processes.background_tasks import BackgroundTasks
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.coordinator import Coordinator
from actors.supervision.incident_artifacts import ArtifactCollector
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.run_history import FLUSH_S, RunHistory, furthest_step, server_names
from actors.training.trainer import MONITOR
from launcher.base.errors import JournalError
from launcher.base.messages import EvalReport, RunOutcome, ServerInfo, TrainerStatus
from launcher.checkpoints.restore_request import finish_restore, read_request
from launcher.config.schema import RunConfig
from launcher.policy.actions import RestoreTrainer
from launcher.reporting.current_status import EVERY_S, CurrentStatusFile, DriverFacts, RunHealth
from launcher.resources.memory_history import MemoryHistory
from launcher.run_files.control_requests import ControlRequest, RequestEntry, wanted
from launcher.run_files.journal import Journal, Record, last_lines
from launcher.run_files.run_memory import MemoryFile, RunMemory
from launcher.run_files.run_paths import RunPaths

REQUESTS_S = 0.5
"""Between two checks of what a person wants of the run."""
Seen = tuple[TrainerStatus, Sequence[ServerInfo], Sequence[EvalReport]]
COORDINATOR = "coordinator"
TRAINERS = ("trainer", "trainer-standby")
"""Names of the actors; the second only with recovery.standby_trainers. The memory says which of them is the trainer."""


def find_servers(config: RunConfig, history: RunHistory) -> dict[str, Any]:
    """Those that there are: of one that there is to be the driver may not have made the actor yet, and one that was
    leaving when the Coordinator before this one was killed may have none any more."""
    memory = history.memory
    wanted, found = server_names(memory.servers or config.sglang.n_servers), {}
    for name in dict.fromkeys([*wanted, *memory.generations]):
        try:
            found[name] = ray.get_actor(name)
        except ValueError:
            if name not in wanted and name not in memory.left:
                history.server_left(name, "its actor has ended")
    return found


def trainer_names(config: RunConfig) -> tuple[str, ...]:
    return TRAINERS[: 1 + (config.recovery.standby_trainers or 0)]


def _find_standby(config: RunConfig, trainer: str) -> tuple[str, Any] | None:
    other = next((name for name in trainer_names(config) if name != trainer), None)
    return None if other is None else (other, ray.get_actor(other))


class RunActor(ABC):
    """What the actors that lead a run share: one `run`, whose outcome several may wait for, `ping` and `abort`. `_lead`
    is each one's own."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int, driver: DriverFacts) -> None:
        """`driver`: as the run's status has it."""
        bind_to_cluster(config)
        self._driver = driver
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._running: asyncio.Task[RunOutcome] | None = None
        self._journal: Journal | None = None
        self._history: RunHistory | None = None
        self._coordinator: Coordinator | None = None

    async def run(self) -> RunOutcome:
        """To the run's end. Raises UsageError where it can't begin."""
        if self._running is None:
            self._running = asyncio.create_task(self._begin())
        return await asyncio.shield(self._running)

    async def ping(self) -> tuple[Record, ...]:
        """Its answer shows that its loop runs. The events that the disk has not taken: nobody can read them there."""
        if self._journal is None:
            return ()
        self._journal.write_waiting()
        if self._history is not None:
            self._history.save()
        return self._journal.unwritten()

    async def abort(self, reason: str) -> None:
        if self._coordinator is not None:
            self._coordinator.abort(reason)

    async def _begin(self) -> RunOutcome:
        """Files are read in threads: this loop answers `ping`."""
        journal = self._journal = Journal(self._paths.events, self._attempt, time.time, in_background=True)
        file = MemoryFile(self._paths.run_memory, this_node())
        history = self._history = RunHistory(
            journal, await take_place(self._config, file, self._attempt, self._paths.events), file
        )
        history.placed(this_node())
        await history.flush_in_time()  # a disk that stalls is only told, and the run ended, by who leads it
        status = await asyncio.to_thread(CurrentStatusFile, self._paths, self._driver)
        over = asyncio.Event()
        failed = partial(journal.record, "trainer.snapshot_failed", subject="trainer")
        writing = asyncio.create_task(repeat(lambda: self._write_status(status), EVERY_S, failed, over))
        try:
            return await self._lead(journal, history)
        finally:
            # Before the outcome: who shows the run reads the last step from the file, and then looks no more. Not
            # cancelled: a write that goes on in its thread would keep the last one from being written.
            over.set()
            with contextlib.suppress(TimeoutError):  # reads and writes that hang may have taken every thread
                async with asyncio.timeout(FLUSH_S):
                    await writing

    async def _write_status(self, status: CurrentStatusFile) -> None:
        if (seen := self._seen()) is not None:
            status.heard(*seen)
        status.judged(self._health())
        await asyncio.to_thread(status.write)  # it waits for a disk that stalls, a moment

    @abstractmethod
    def _seen(self) -> Seen | None:
        """The run as it is now; None while the trainer can't say, and the last answer stays."""

    @abstractmethod
    def _health(self) -> RunHealth | None:
        """As it was seen last; None where nobody judges servers, or none has been looked at."""

    @abstractmethod
    async def _lead(self, journal: Journal, history: RunHistory) -> RunOutcome: ...

    async def _following(self, coordinator: Coordinator, journal: Journal) -> RunOutcome:
        """Run to the end, and carry out meanwhile what a person asks for."""
        self._coordinator = coordinator
        requests = BackgroundTasks()
        requests.start(follow_requests(coordinator, lambda: wanted(self._paths), journal))
        try:
            return await coordinator.run()
        finally:
            await requests.close()


@ray.remote
class CoordinatorActor(RunActor):
    """`run` once in each incarnation; `abort` at any time."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        attempt: int,
        driver: DriverFacts,
        *,
        has_monitor: bool,
        on_gpu: bool = False,
        shares_gpu: bool = False,
        book: MemoryHistory | None = None,
    ) -> None:
        super().__init__(config, paths, attempt, driver)
        self._observer: ClusterObserver | None = None
        self._has_monitor = has_monitor
        self._on_gpu = on_gpu
        self._shares_gpu = shares_gpu
        self._book = book

    async def _lead(self, journal: Journal, history: RunHistory) -> RunOutcome:
        """The cluster's store is asked in threads too."""
        to_thread = asyncio.to_thread
        memory = OomBackoff(self._config, history, self._book, on_gpu=self._on_gpu, shares_gpu=self._shares_gpu)
        observer = self._observer = ClusterObserver(
            self._config,
            self._paths,
            history,
            servers=await to_thread(find_servers, self._config, history),
            trainer=await to_thread(ray.get_actor, history.memory.trainer_actor),
            standby=await to_thread(_find_standby, self._config, history.memory.trainer_actor),
            monitor=await to_thread(ray.get_actor, MONITOR) if self._has_monitor else None,
            memory=memory,
            furthest=await to_thread(furthest_step, self._paths.metrics, self._attempt),
        )
        executor = ActionExecutor(self._config, history, observer, shares_gpu=self._shares_gpu)
        artifacts = ArtifactCollector(self._paths, pids=observer.pids)
        coordinator = Coordinator(self._config, executor, history, artifacts=artifacts)
        requests = BackgroundTasks()
        requests.start(follow_restores(coordinator, self._paths, journal, history.memory))
        try:
            return await self._following(coordinator, journal)
        finally:
            await requests.close()

    def _seen(self) -> Seen | None:
        """While the trainer starts or restores, it answers with nothing else."""
        if self._observer is None:
            return None
        trainer = self._observer.trainer
        view = trainer.view
        if not view.is_started or view.busy:
            return None
        status = TrainerStatus(
            phase=view.phase,
            next_step=view.next_step,
            total_steps=view.total_steps,
            steps_per_epoch=view.steps_per_epoch,
            policy_version=view.policy_version,
            pid=view.pid,
            seconds_in_phase=view.seconds_in_phase + time.monotonic() - trainer.probe.answered_at,
        )
        return status, view.servers, view.evals

    def _health(self) -> RunHealth | None:
        return None if self._observer is None else self._observer.health()


async def take_place(config: RunConfig, file: MemoryFile, attempt: int, events: Path) -> RunMemory:
    """The memory to continue from. One that was started on another node first waits until the one before it has ended,
    behind a partition too. Raises RunError."""
    memory = await asyncio.to_thread(file.read, attempt)
    if file.writer not in ("", this_node()) and (lease_s := lease_of(config)) is not None:
        await asyncio.sleep(lease_s + MARGIN_S)
        memory = await asyncio.to_thread(file.read, attempt)  # with what the one before decided meanwhile
    with contextlib.suppress(OSError, JournalError):  # a disk that does not give the journal must not keep it away
        lines = await asyncio.to_thread(lambda: [*last_lines(events)])
        memory.catch_up(lines, is_here=file.writer in ("", this_node()))
    return memory


async def follow_requests(coordinator: Coordinator, read: Callable[[], RequestEntry | None], journal: Journal) -> None:
    """Carry out what a person wants of the run, as its file contains it now: a state, not an order, so that the request
    outlives a Coordinator."""

    async def follow() -> None:
        carry_out(await asyncio.to_thread(read), coordinator)

    await repeat(follow, REQUESTS_S, partial(journal.record, "request.failed", subject="user"))


async def follow_restores(coordinator: Coordinator, paths: RunPaths, journal: Journal, memory: RunMemory) -> None:
    """As `follow_requests`, for the restore that a person asks for. One that is done is no longer asked for, though the
    Coordinator that did it was killed before it removed the request."""

    async def follow() -> None:
        asked = await asyncio.to_thread(read_request, paths)
        if asked is not None and asked.restore_count <= memory.restore_taken:
            await asyncio.to_thread(finish_restore, paths)
            asked = None
        if asked is None:
            coordinator.restore(None)
            return
        reason = f"a restore to step {asked.step}, {asked.why}"
        coordinator.restore(RestoreTrainer(global_step=asked.step, reason=reason, restore_count=asked.restore_count))

    await repeat(follow, REQUESTS_S, partial(journal.record, "request.failed", subject="user"))


async def repeat(
    work: Callable[[], Awaitable[None]],
    every_s: float,
    failed: Callable[..., object],
    over: asyncio.Event | None = None,
) -> None:
    """Do `work` until it is `over`, and once more then. An error is a defect: `failed(reason=…)` records it once, and
    it costs neither the run nor the next time: else what a person asks for, or is shown, would end without a message.
    """
    over = over or asyncio.Event()
    error_before, is_last = "", False
    while not is_last:
        is_last = over.is_set()
        try:
            await work()
            error_before = ""
        except Exception as error:  # noqa: BLE001 - whatever it is
            if repr(error) != error_before:
                failed(reason=repr(error))
            error_before = repr(error)
        if not is_last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await over.wait()


def carry_out(asked: RequestEntry | None, coordinator: Coordinator) -> None:
    wish = ControlRequest.RUN if asked is None else asked.wish
    coordinator.hold(f"a pause {asked.description}" if asked is not None and wish is ControlRequest.PAUSE else "")
    if asked is not None and wish is ControlRequest.STOP:
        coordinator.abort(asked.description)
    elif asked is not None and asked.servers is not None:
        coordinator.resize(asked.servers, asked.description)
