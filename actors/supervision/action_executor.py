"""Carries out the Coordinator's actions on a real run: its server and trainer actors, checkpoints, weight folders.

Each action ends with a new observation of what it changed: a plan made from an older one would order it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Awaitable, Sequence
from typing import assert_never

from actors.cluster.actor_calls import ActorAway
from actors.processes.background_tasks import BackgroundTasks
from actors.supervision.cluster_observer import MARGIN_S, ClusterObserver
from actors.supervision.coordinator import Facts
from actors.supervision.fleet_scaling import FleetScaling
from actors.supervision.run_history import RunHistory
from actors.supervision.server_handle import ServerHandle
from actors.supervision.standby_handle import NEW_PROCESS_S, PARK_S
from actors.supervision.verifier_retry import ask_the_verifier_again
from actors.weights.start_weights import StartWeights, forget, keep_checkpoint, keep_for, release
from launcher.base.errors import CheckpointError, DataError, DiskError, LauncherError, RunError, ServerError, UsageError
from launcher.base.messages import Overrides, ServerInfo, ServerState, TerminalStatus, TrainerReady
from launcher.checkpoints.restore_request import finish_restore, go_back
from launcher.config.schema import RunConfig
from launcher.policy.actions import (
    AbandonServer,
    Action,
    AdmitServer,
    Halt,
    LeaveServer,
    LoadWeights,
    ParkTrainer,
    PauseTrainer,
    RestartServer,
    RestartTrainer,
    RestoreTrainer,
    ResumeTrainer,
    UnparkTrainer,
)
from launcher.policy.observed import TRAINER, Observed, holds_damage
from launcher.policy.restore import first_damaged

STOP_S, LAST_ORDER_S = 30.0, 10.0


class ActionExecutor:
    """`shares_gpu`: the servers and the trainer run on one GPU."""

    def __init__(self, config: RunConfig, history: RunHistory, observer: ClusterObserver, *, shares_gpu: bool) -> None:
        self.changed = observer.changed
        self._config = config
        self._history = history
        self._observer = observer
        self._slots = observer.slots
        self._trainer = observer.trainer
        self._monitor = observer.monitor
        self._memory = observer.memory
        self._shares_gpu = shares_gpu
        self._tasks = BackgroundTasks()
        self._unusable: UsageError | None = None
        self._is_stopped = False
        self._fleet = FleetScaling(history, observer, drain_s=config.sglang.drain_timeout)

    # ── the beginning ──

    async def begin(self) -> None:
        """Adopt, or start: a server that this attempt never started, a trainer that is empty and never was."""
        await self._memory.begin()
        memory = self._history.memory
        known = [slot for name, slot in self._slots.items() if name in memory.generations]
        adopted = [slot.adopt(memory.generations[slot.name], memory.start_lineages[slot.name]) for slot in known]
        await asyncio.gather(self._observer.refresh(), *adopted)
        for name in memory.abandoned & self._slots.keys():
            self._slots[name].give_up()
        self._trainer.adopt()
        self._observer.begin_looking()
        if self._monitor is not None:
            self._tasks.start(ask_the_verifier_again(self._observer, self._monitor, self._config.reward_health))
        fresh = [slot for name, slot in self._slots.items() if name not in self._history.memory.generations]
        for slot in fresh:
            slot.expect()
        servers = [self._tasks.start(self._first_start(self._start_server(slot))) for slot in fresh]
        view = self._trainer.view
        was_loaded = self._history.lineage > 0 or bool(self._history.attempts)  # then the plan restarts it
        if not view.is_started and not view.busy and not was_loaded:
            self._trainer.expect()
            self._tasks.start(self._first_start(self._start_trainer(servers if self._shares_gpu else [])))

    async def _first_start(self, starting: Awaitable[object]) -> None:
        """A start that the user's settings make impossible ends the run; the plan repairs anything else."""
        try:
            await starting
        except UsageError as error:
            self._unusable = error
        except LauncherError as error:
            self._history.event("start.failed", subject="run", reason=error.message)
        self.changed.set()

    async def _start_trainer(self, before: Sequence[asyncio.Task[None]]) -> None:
        """SGLang takes its share of what memory is free when it starts: on one GPU the servers go first."""
        if before:
            await asyncio.wait(before)
        started = time.monotonic()
        ready = await self._restart_trainer()
        self._history.event(
            "trainer.started",
            subject="trainer",
            reason="model, data and reward function are loaded",
            seconds=time.monotonic() - started,
            **dataclasses.asdict(ready),
        )

    async def _restart_trainer(self) -> TrainerReady:
        overrides = self._history.started_trainer()
        await self._history.flush()
        return await self._trainer.start(overrides)

    async def observe_run(self, *, with_checkpoints: bool = False) -> Observed:
        if self._unusable is not None:
            raise self._unusable
        self._tasks.check()
        return await self._observer.observe_run(is_stopped=self._is_stopped, with_checkpoints=with_checkpoints)

    # ── acting ──

    def deadline_s(self, action: Action) -> float:
        config = self._config
        match action:
            case RestartServer():
                return config.rollout.setup_timeout + STOP_S + 2 * MARGIN_S
            case LoadWeights():
                return config.actor.weight_update_timeout + MARGIN_S
            case AdmitServer():
                return config.rollout.request_timeout + MARGIN_S
            case RestartTrainer() | RestoreTrainer() | PauseTrainer(save=True):
                return config.health.trainer_first_s + MARGIN_S
            case PauseTrainer():
                return config.health.trainer_min_s
            case ParkTrainer() | UnparkTrainer():
                return PARK_S + NEW_PROCESS_S + MARGIN_S
            case LeaveServer():
                return self._fleet.leave_deadline_s
            case Halt():
                return config.health.trainer_first_s + 4 * STOP_S
            case ResumeTrainer() | AbandonServer():
                return STOP_S
            case _:
                assert_never(action)

    async def perform(self, action: Action) -> Facts:
        try:
            return await self._do(action)
        finally:
            await self._observer.refresh()

    async def _do(self, action: Action) -> Facts:
        match action:
            case PauseTrainer(save=save):
                await self._trainer.pause(save=save)
            case ResumeTrainer():
                await self._trainer.resume()
            case RestartTrainer(overrides=rung):
                if (where := self._trainer.facts().ran_out) is not None:
                    await self._memory.ran_out("trainer", where, self._trainer.lengths, rung)
                await self._restart_trainer()
                return {"pid": self._trainer.view.pid}
            case ParkTrainer():
                standby = self._observer.the_standby()
                return {"pid": await standby.park(self._history.memory.overrides, self._trainer.view)}
            case UnparkTrainer():
                await self._observer.the_standby().end()
            case RestoreTrainer(restore_count=int()):
                return await self._restore_as_asked()
            case RestoreTrainer(global_step=step, onset_step=onset_step, condemn_after=damaged):
                # Before the load: a Coordinator that takes over after it sees sound weights, and would condemn nothing.
                if damaged is not None:
                    await self._condemn(damaged, action.reason)
                return await self._restore(step, onset_step)
            case RestartServer(name=name, overrides=rung):
                return await self._restart_server(await self._fleet.slot_of(name), rung)
            case AbandonServer(name=name):
                await self._abandon(self._slots[name])
            case LeaveServer(name=name):
                return await self._fleet.leave(name)
            case LoadWeights(name=name, lineage=lineage):
                return {"version": await self._load_weights(name, lineage)}
            case AdmitServer(name=name):
                return await self._admit(self._slots[name])
            case Halt(word=word, reinstate_after=restored):
                await self._halt(word, restored)
            case _:
                assert_never(action)
        return {}

    async def _condemn(self, after_step: int, reason: str) -> None:
        """Cancelled at its deadline, as a disk stalls, it condemns nothing later: steps may have been taken since."""
        began, is_over = time.monotonic(), threading.Event()
        self._history.event("checkpoint.condemning", subject="checkpoint", reason=reason, after_step=after_step)
        # On the disk before any is moved: it is how a restore that was a mistake finds what nobody lived to name.
        await self._history.flush()
        try:
            names = await asyncio.to_thread(self._observer.catalog.condemn_after, after_step, is_over.is_set)
        except (LauncherError, OSError, asyncio.CancelledError):
            # Else three moments without that disk would spend the budget of restores, and end the run.
            self._history.not_restored("nothing could be condemned, and the trainer was not asked: it does not count")
            raise
        finally:
            is_over.set()
        self._history.event(
            "checkpoint.condemned",
            subject="checkpoint",
            reason=reason,
            after_step=after_step,
            checkpoints=list(names),
            seconds=time.monotonic() - began,
        )

    async def _restore_as_asked(self) -> Facts:
        """The request is gone when it is done, so that no launch goes back once more, and when it can't be done."""
        paths = self._observer.catalog.trial.paths
        is_over = threading.Event()
        try:
            try:
                taken = await asyncio.to_thread(go_back, paths, is_over.is_set)
            finally:
                is_over.set()
            if taken is None:
                raise RunError("what was asked for is done, or was taken back")
            facts = await self._restore(taken.request.step, None)
        except DiskError:
            raise
        except CheckpointError as error:
            self._history.event("recovery.refused", subject="checkpoint", reason=error.message)
            await asyncio.to_thread(finish_restore, paths)
            raise
        self._history.took_restore(taken.facts)
        await self._history.flush()  # before the request is removed: killed in between, the next one only removes it
        await asyncio.to_thread(finish_restore, paths)
        # Another may have been asked for since it was ordered.
        return {**facts, "global_step": taken.request.step, "restore_count": taken.request.restore_count}

    async def _restore(self, global_step: int, onset_step: int | None) -> Facts:
        incident = self._history.incidents.number_for("trainer.restored", TRAINER)
        try:
            next_step = await self._trainer.restore(global_step, self._history.lineage, incident)
        except CheckpointError as error:
            if not isinstance(error, DiskError):  # of which an older one knows no more
                made_at = await asyncio.to_thread(self._observer.catalog.made_at, global_step)
                self._history.found_damaged(global_step, made_at, error.message)
            raise
        except DataError as error:  # of another data set: no older checkpoint is of this one
            self._unusable = error
            raise
        if self._monitor is not None:
            await self._monitor.restored(global_step, onset_step, self._history.lineage)
        probation = {} if onset_step is None else {"probation_steps": self._config.reward_health.probation_steps}
        return {"next_step": next_step, "lineage": self._history.lineage, **probation}

    async def _restart_server(self, slot: ServerHandle, rung: Overrides) -> Facts:
        if (where := self._observer.ran_out(slot)) is not None:
            await self._memory.ran_out(slot.name, where, self._trainer.lengths, rung)
        if self._memory.concurrency is not None:  # before requests that wait for a server find one
            with contextlib.suppress(LauncherError):  # a trainer that is away starts with the limit
                await self._trainer.call("limit_rollouts", self._memory.concurrency)
        await self._take_from_traffic(slot, ServerState.DEAD)
        info = await self._start_server(slot)
        return {"generation": slot.generation, "pid": info.pid, "weight_version": info.weight_version}

    async def _start_server(self, slot: ServerHandle) -> ServerInfo:
        generation = self._history.memory.generations.get(slot.name, -1) + 1
        try:
            weights = await asyncio.to_thread(self._start_weights, slot.name)
        except LauncherError as error:
            slot.not_started(error.message)
            raise
        overrides = self._history.started_server(slot.name, generation, weights.version, weights.lineage)
        await self._history.flush()
        try:
            return await slot.start(generation, weights, overrides)
        finally:
            await asyncio.to_thread(release, slot.name, self._observer.catalog.trial.default)

    def _start_weights(self, name: str) -> StartWeights:
        """The trainer's newest, where it has any; else the checkpoint that it is about to load, or the first ones.

        Raises CheckpointError, StorageError.
        """
        view = self._trainer.view
        if view.is_loaded and view.weights is not None and (kept := keep_for(name, view.weights)) is not None:
            return kept
        # A command's restores change no weights of servers: those are given to the door, and stay.
        lineage = 1 if self._history.lineage == 0 or not self._observer.has_trainer else None
        catalog = self._observer.catalog
        while (found := catalog.newest_model(self._history.memory.damaged_checkpoints)) is not None:
            if (kept := keep_checkpoint(name, found)) is not None:
                return dataclasses.replace(kept, lineage=lineage)
        return StartWeights(path=self._config.sglang.model_path, version=0, lineage=lineage)

    async def _take_from_traffic(self, slot: ServerHandle, state: ServerState) -> None:
        """Its requests end with its process in any case; a trainer that is away has none."""
        if slot.info is not None:
            with contextlib.suppress(LauncherError):
                await self._trainer.call("set_servers", [dataclasses.replace(slot.info, state=state)])

    async def _abandon(self, slot: ServerHandle) -> None:
        slot.give_up()
        await self._take_from_traffic(slot, ServerState.FAILED)
        await slot.stop()

    def _living(self, name: str) -> ServerInfo:
        info = self._slots[name].info
        if info is None or info.state is not ServerState.READY:
            raise ServerError(f"{name} is not there to be given anything")
        return info

    async def _load_weights(self, name: str, lineage: int) -> int:
        """The version that it got: the one that was ordered, or a newer one."""
        within_s = self._config.actor.weight_update_timeout
        with self._observer.loads.loads(name):
            version: int = await self._trainer.call("send_weights", self._living(name), lineage, within_s=within_s)
        if self._monitor is not None:  # what made it doubtful is gone; the golden probe is still to come
            await self._monitor.trust(name)
        return version

    async def _admit(self, slot: ServerHandle) -> Facts:
        # As the trainer knows it, which tells the lineage of its weights.
        known = {(info.name, info.generation): info for info in self._trainer.view.servers}
        info = known.get((slot.name, slot.generation), self._living(slot.name))
        distance = await self._trainer.call("admit", info, within_s=self._config.rollout.request_timeout)
        facts: dict[str, object] = {"pid": info.pid, "url": info.url, "generation": info.generation}
        if (seconds := slot.recovered_after_s()) is not None:
            facts["recovered_after_s"] = seconds
        if distance is None:
            facts["reason"] = "its log-probs were compared with nobody's: no other server could be asked at its weights"
        return {**facts, "weight_version": info.weight_version, "distance": distance}

    # ── the end ──

    async def _halt(self, word: TerminalStatus, reinstate_after: int | None) -> None:
        """In reverse order of the start. Nothing here may keep the run from ending: the driver ends what stays."""
        self._tasks.cancel()
        try:
            # First: the rest may take minutes, and whoever gives up on it would leave set aside what was learned.
            if reinstate_after is not None:
                await self._reinstate(reinstate_after)
            if word is not TerminalStatus.FINISHED:
                await self._quietly("trainer", self._save(), within_s=self._config.health.trainer_first_s)
            weights = self._trainer.view.weights
            if self._monitor is not None:
                await self._quietly("health_monitor", self._monitor.release())
            await self._quietly("trainer", self._trainer.call("close"))
            await asyncio.gather(*(self._quietly(name, slot.stop()) for name, slot in self._slots.items()))
            for name in self._slots:
                await self._quietly(name, asyncio.to_thread(forget, name, weights))
        finally:  # else a stop that fails would be ordered again and again
            self._is_stopped = True

    async def _reinstate(self, after_step: int) -> None:
        """Undo the restore to `after_step`; the reason of the halt then says what became of it."""
        event, reason = "checkpoint.reinstated", "the weights were not what changed"
        names: tuple[str, ...] = ()
        self._history.event("checkpoint.reinstating", subject="checkpoint", reason=reason, after_step=after_step)
        try:
            async with asyncio.timeout(STOP_S):
                names = await asyncio.to_thread(self._observer.catalog.reinstate_after, after_step)
        except (LauncherError, OSError, TimeoutError) as error:
            why = error.message if isinstance(error, LauncherError) else str(error) or f"no answer in {STOP_S:g} s"
            reason = (
                f"what was set aside after step {after_step} could not be put back ({why}); the same command resumes "
                f"from step {after_step}"
            )
            event = "checkpoint.reinstating_failed"
        else:
            reason = "what the last restore set aside is back" if names else "nothing that it named is left set aside"
            reason += ", and the same command resumes from the newest"
        self._history.put_back(event, after_step, names, reason)

    async def _save(self) -> None:
        view, incident = self._trainer.view, self._observer.incident(time.monotonic())
        try:
            if view.is_loaded and (view.is_running or view.is_allowed):
                damaged = holds_damage(incident, self._trainer.facts())
                await self._trainer.pause(save=not damaged, within_s=LAST_ORDER_S)
        finally:  # what is damaged is not kept, whatever became of the trainer's last order
            if incident is not None and (first := first_damaged(incident)) is not None:
                await asyncio.to_thread(self._observer.catalog.forget_after, first - 1)

    async def _quietly(self, subject: str, ending: Awaitable[None], *, within_s: float = STOP_S) -> None:
        try:
            async with asyncio.timeout(within_s):
                await ending
        except (RunError, ActorAway, TimeoutError) as error:
            self._history.event("actor.stop_failed", subject=subject, reason=str(error) or "no answer in time")

    async def close(self) -> None:
        await asyncio.gather(self._tasks.close(), self._observer.close(), return_exceptions=True)
