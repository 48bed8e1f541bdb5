"""Observes a real run for the Coordinator: its servers, its trainer, its monitor, its nodes and its checkpoints.

A task asks each actor, so one that hangs delays nothing. Threads read the disk: the loop answers for the Coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.cluster.fencing import lease_of
from actors.cluster.node_identity import is_here
from actors.cluster.node_watch import ClusterNode, NodeWatch
from actors.monitoring.disk_watch import DiskWatch
from actors.processes.background_tasks import BackgroundTasks
from actors.serving.server_report import ServerReport
from actors.supervision.checkpoint_scan import CheckpointScan
from actors.supervision.monitor_handle import MonitorHandle
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.run_health import health_of
from actors.supervision.run_history import ProgressTracker, RunHistory, index_of
from actors.supervision.server_handle import HangReasons, ServerHandle, ServerLoads
from actors.supervision.standby_handle import StandbyHandle
from actors.supervision.trainer_handle import TrainerHandle
from launcher.base.errors import LauncherError
from launcher.base.messages import Health, Incident, ServerExit, ServerInfo, ServerState
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.config.schema import RunConfig
from launcher.policy.checkpoint_status import CheckpointFacts
from launcher.policy.exit_cause import RanOut
from launcher.policy.observed import TRAINER, Observed, ServerFacts, StandbyTrainer, TrainerFacts, is_dead
from launcher.policy.restore import first_damaged
from launcher.reporting.current_status import RunHealth
from launcher.run_files.run_paths import RunPaths

NOTHING_JUDGED = -1
MARGIN_S = 15.0
"""Added to a deadline that something has of its own: a call that waits, a process that ends."""


class ClusterObserver:
    """`servers`, `trainer` and `monitor` are actors. `changed` is set when what is seen should not wait for the next
    turn.
    """

    has_trainer = True
    """The launcher's own."""
    handle_type = TrainerHandle

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        history: RunHistory,
        *,
        servers: Mapping[str, Any],
        trainer: Any,
        standby: tuple[str, Any] | None = None,
        monitor: Any,
        memory: OomBackoff,
        furthest: int = 0,
    ) -> None:
        """`standby`: the trainer's other actor, with its name. `furthest`: the step after the last one that this
        attempt has ever committed."""
        self.changed = asyncio.Event()
        self._config = config
        self._history = history
        self.memory = memory
        self._hangs = HangReasons(lambda name: paths.server_log(index_of(name)))
        self._progress = ProgressTracker(history, furthest)
        self._was_at: tuple[int, int] | None = None  # lineage and next step at the last look
        self._stepped_at: float | None = None
        self.slots: dict[str, ServerHandle] = {}
        self.actors: dict[str, Any] = {TRAINER: trainer}
        for name, actor in servers.items():
            self.add_slot(name, actor)
        self.loads = ServerLoads(self.slots, limit_s=config.actor.weight_update_timeout)
        self.standby = (
            None
            if standby is None
            else StandbyHandle(
                standby[1],
                (history.memory.trainer_actor, standby[0]),
                took_over=self._took_over,
                changed=self.changed,
                hung_after_s=config.health.supervisor_silence_s,
            )
        )
        self.trainer = self.handle_type(
            trainer,
            ended=self._trainer_ended,
            changed=self.changed,
            health=config.health,
            log=paths.trainer_log,
            lease_s=lease_of(config),
            standby=self.standby,
        )
        self.nodes = NodeWatch(self.actors, lost=self._node_lost, joined=self._node_joined, known=history.memory.nodes)
        self._has_nodes = config.cluster.address != "local"
        self._unschedulable: set[str] = set()
        self._tasks = BackgroundTasks()
        self.monitor = (
            None
            if monitor is None
            else MonitorHandle(
                monitor,
                work=lambda: self.loads.work(self.trainer.view),
                heard=self._server_heard,
                changed=self.changed,
                hung_after_s=config.health.supervisor_silence_s,
                hung=self._monitor_hung,
            )
        )
        self.disks = DiskWatch.of(paths, config.disk, changed=self._disk_answered)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._known_dead: set[str] | None = None
        self._last_look: tuple[float, Observed] | None = None
        self.catalog = CheckpointCatalog.of_run(config, paths)
        self.checkpoints = CheckpointScan(
            self._read_checkpoints,
            unreadable=self._checkpoints_unreadable,
            patience_s=config.disk.patience_s,
            was_read=history.lineage > 0,  # a restore was ordered, which is chosen from what was read
        )

    def the_standby(self) -> StandbyHandle:
        """Where the run has one: only then is it ordered anything."""
        assert self.standby is not None
        return self.standby

    def add_slot(self, name: str, actor: Any) -> ServerHandle:
        setup_s = self._config.rollout.setup_timeout + MARGIN_S
        self.slots[name] = ServerHandle(
            name,
            actor,
            died=self._server_died,
            changed=self.changed,
            setup_s=setup_s,
            hung_after_s=self._config.health.supervisor_silence_s,
        )
        self.slots[name].progress_at = self._progress.at(name)
        self.actors[name] = actor
        return self.slots[name]

    def drop_slot(self, name: str) -> None:
        self.slots.pop(name, None)
        self.actors.pop(name, None)

    async def refresh(self) -> None:
        """After an action, whose effect the next plan must know."""
        self.checkpoints.invalidate()
        await self.trainer.probe.refresh()

    def begin_looking(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.trainer.begin_looking()
        if self.standby is not None:
            self.standby.begin_looking()
        if self._has_nodes:
            self.nodes.begin_looking()
        if self.monitor is not None:
            self.monitor.begin_looking()

    async def observe_run(self, *, is_stopped: bool, with_checkpoints: bool = False) -> Observed:
        """What is known when it returns; only the disk is waited for, and not for long."""
        found = await self.checkpoints.read() if with_checkpoints else None
        look = self._compose(found, is_stopped=is_stopped)
        if self._hangs.has_unread:
            await self._hangs.read()
            look = self._compose(found, is_stopped=is_stopped)
        dead = {server.name for server in look.servers if is_dead(server)}
        dead |= {TRAINER} if look.trainer.verdict.health is Health.DEAD else set()
        if self._known_dead is None or not dead <= self._known_dead:  # it may have died of its disk
            await self.disks.probed()
            look = self._compose(found, is_stopped=is_stopped)
        self._known_dead = dead
        self._last_look = time.monotonic(), look
        return look

    def health(self) -> RunHealth | None:
        """As of the last look; None before the first."""
        if self._last_look is None:
            return None
        at, seen = self._last_look
        return health_of(
            seen,
            age_s=time.monotonic() - at,
            reasons={info.name: info.reason for info in self.trainer.view.servers},
            silent_s={name: slot.silent_s for name, slot in self.slots.items()},
            has_trainer=self.has_trainer,
        )

    def _disk_answered(self) -> None:
        """On a thread of a probe: the loop may have ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.changed.set)

    def _compose(self, found: Sequence[CheckpointFacts] | None, *, is_stopped: bool) -> Observed:
        self._tasks.check()
        now = time.monotonic()
        trainer = self.trainer.facts(self.nodes.unschedulable_since(TRAINER))
        incident, view = self.incident(now), self.trainer.view
        in_pool = {info.name: info for info in view.servers}
        self._note_progress(trainer.next_step, in_pool, now)
        self._note_fleet()
        self._note_step(trainer, now)
        self.disks.refused(view.refusal)
        self.disks.refused(self._history.refusal)
        damaged = first_damaged(incident) if incident is not None else None
        healthy_until = trainer.next_step - 1 if damaged is None else damaged - 1
        return Observed(
            servers=tuple(
                self.memory.as_due(
                    self._seen(
                        slot,
                        in_pool.get(name),
                        is_publishing=trainer.is_publishing or name in view.loading,
                    )
                )
                for name, slot in self.slots.items()
            ),
            trainer=trainer,
            checkpoints=None if found is None else self.judged(found, healthy_until),
            memory=self.memory.settings(self.trainer.lengths),
            incident=incident,
            is_judged=self.monitor is None or self.monitor.is_heard,
            progress_at=self._progress.at(TRAINER),
            is_stopped=is_stopped,
            evals=view.evals,
            rejections=view.rejections,
            lower_level=None if self.monitor is None else self.monitor.lower_level,
            monitor_silent_s=0.0 if self.monitor is None else self.monitor.silent_s,
            monitor_error="" if self.monitor is None else self.monitor.error,
            disk=self.disks.trouble(now, stepped_at=self._stepped_at, patient=view.is_saving and view.is_running),
            standby_trainer=StandbyTrainer.NONE if self.standby is None else self.standby.state,
        )

    def pids(self) -> dict[str, int]:
        """Of the main process of each server and of the trainer, as far as they are known and of this node."""
        infos = {name: slot.info for name, slot in self.slots.items()}
        known = {name: info.pid for name, info in infos.items() if info is not None and is_here(info.node)}
        if self.has_trainer:
            known["trainer"] = self.trainer.view.pid or None if is_here(self.trainer.view.node) else None
        return {name: pid for name, pid in known.items() if pid is not None}

    def incident(self, now: float) -> Incident | None:
        return self.trainer.incident(now) or (self.monitor.incident if self.monitor is not None else None)

    def _read_checkpoints(self) -> tuple[CheckpointFacts, ...]:
        return self.catalog.facts(NOTHING_JUDGED, dict(self._history.memory.damaged_checkpoints))

    def _checkpoints_unreadable(self, reason: str) -> None:
        self._history.event("checkpoint.unreadable", subject="checkpoints", reason=reason)

    def judged(self, found: Sequence[CheckpointFacts], healthy_until: int) -> tuple[CheckpointFacts, ...]:
        """`healthy_until`: the last step that was judged healthy."""
        return tuple(replace(one, status=self.catalog.status_at(one.global_step, healthy_until)) for one in found)

    def ran_out(self, slot: ServerHandle) -> RanOut | None:
        """Where memory ran out, if that ended this incarnation."""
        return self._seen(slot, None, is_publishing=False).ran_out

    def _seen(self, slot: ServerHandle, in_pool: ServerInfo | None, *, is_publishing: bool) -> ServerFacts:
        judged = None if self.monitor is None else self.monitor.verdict(slot.name, slot.generation)
        unschedulable_since = self.nodes.unschedulable_since(slot.name)
        facts = slot.facts(in_pool, judged, is_publishing=is_publishing, unschedulable_since=unschedulable_since)
        facts = replace(facts, is_loading=slot.name in self.trainer.view.loading)
        return self._hangs.explain(facts, slot.generation)

    async def close(self) -> None:
        self.checkpoints.close()
        self.disks.close()
        closing = [
            self._tasks.close(),
            self.trainer.close(),
            self.nodes.close(),
        ]
        closing += [one.close() for one in (self.monitor, self.standby) if one is not None]
        await asyncio.gather(*closing, return_exceptions=True)

    def _note_progress(self, next_step: int, in_pool: Mapping[str, ServerInfo], now: float) -> None:
        """Before the look that it is part of: with the help of whoever is READY."""
        helpers = [name for name in self.slots if name in in_pool and in_pool[name].state is ServerState.READY]
        self._progress.note(next_step, helpers, now)
        for name, slot in self.slots.items():
            slot.progress_at = self._progress.at(name)

    def _note_step(self, trainer: TrainerFacts, now: float) -> None:
        """Of those that are taken again after a restore too, which are no progress: the disk has taken them."""
        is_at = (trainer.lineage, trainer.next_step) if trainer.is_loaded else None
        if is_at is not None and self._was_at is not None and is_at[0] == self._was_at[0] and is_at > self._was_at:
            self._stepped_at = now
        self._was_at = is_at

    def _note_fleet(self) -> None:
        """Recorded when a server has no node any more, and when one has room for it again."""
        unschedulable = {name for name in self.slots if self.nodes.unschedulable_since(name) is not None}
        left = len(self.slots) - len(unschedulable)
        for name in sorted(unschedulable - self._unschedulable):
            reason = f"Ray has found no node for {name} so far: {left} of {len(self.slots)} servers continue"
            self._history.event("fleet.shrunk", subject=name, reason=reason, servers=left)
            known = [info for info in self.trainer.view.servers if info.name == name]
            self._tasks.start(self._tell_trainer([replace(i, state=ServerState.DEAD, reason=reason) for i in known]))
        for name in sorted(self._unschedulable - unschedulable):
            reason = f"Ray has found a node for {name}"
            self._history.event("fleet.grown", subject=name, reason=reason, servers=left)
        self._unschedulable = unschedulable

    def _node_lost(self, node: ClusterNode) -> None:
        """Its servers get no more traffic at once: what waits for an answer from there would wait for its timeout."""
        reason = f"node {node.address} ({node.id[:8]}) was lost"
        gone = [slot for slot in self.slots.values() if slot.lost_with_node(node.id, reason)]
        names = [slot.name for slot in gone]
        if self.trainer.lost_with_node(node.id, reason):
            names.append(TRAINER)
        if self._config.actor.dp_size > 1:  # one of its ranks may have been there
            self.trainer.fence()
        if node.id in self._history.memory.coordinator_nodes:
            names.append("the Coordinator")
        self._history.node_lost(node.id, node.address, node.reason or reason, names)
        infos = [replace(slot.info, state=ServerState.DEAD, reason=reason) for slot in gone if slot.info is not None]
        if infos and TRAINER not in names:
            self._tasks.start(self._tell_trainer(infos))

    async def _tell_trainer(self, infos: list[ServerInfo]) -> None:
        with contextlib.suppress(LauncherError):  # a trainer that is away has no requests either
            await self.trainer.call("set_servers", infos)

    def _node_joined(self, node: ClusterNode) -> None:
        self._history.node_joined(node.id, node.address)

    def _server_heard(self, name: str, report: ServerReport) -> None:
        if name in self.slots:  # else it has left since it was asked
            self.slots[name].take_report(report)

    def _server_died(self, end: ServerExit) -> None:
        if (end.name, end.generation) in self._history.memory.died:
            return  # recorded by the Coordinator before this one
        self._history.server_died(end)

    def _monitor_hung(self) -> None:
        self._history.event("monitor.hung", subject="health_monitor", reason="answers nobody: it is ended")

    async def _took_over(self, name: str, actor: Any) -> None:
        self.actors[TRAINER] = actor
        await self._history.took_over(name)

    def _trainer_ended(self, reason: str) -> None:
        self._history.event("trainer.died", subject="trainer", reason=reason)
