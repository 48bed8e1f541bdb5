"""Decides nothing: writes down what was decided, as an event for people and tools, and in the memory of the run.

    a method below ─► a line of events.jsonl ─► RunMemory changes ─► memory.json, behind the line

The memory is written once for all that one turn of the loop has decided, so that a repair is never counted without
being ordered. An action is begun only after `secure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.base.disk_faults import Refusal
from launcher.base.messages import Overrides, Rejection, ServerExit
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
from launcher.policy.incident_policy import Ending, Trouble
from launcher.policy.memory_backoff import TriedSettings
from launcher.policy.observed import ENDS, TRAINER, RunState
from launcher.policy.restart_budget import RepairAttempt, restored_nothing, still_counted
from launcher.resources.memory_history import RememberedSettings
from launcher.run_files.journal import Journal, LineTail
from launcher.run_files.run_memory import IncidentMemory, MemoryFile, RunMemory
from launcher.run_files.run_order import TAKEN

FLUSH_S = 10.0
"""For the journal's lines and the memory before the run is led, before a pause and a halt, and for the last ones at the
end of the run: a disk that stalls must not keep a run from ending."""

TOOK_OVER = "trainer.took_over"
RESIZED = "fleet.resized"
LEFT = "server.left"
LAST_BYTES = 256 * 1024
"""Of the metrics: some hundred steps, more than were repeated since the restore that a killed Coordinator ordered."""

EVENTS: Mapping[type[Action], tuple[str, str]] = {
    PauseTrainer: ("trainer.pausing", "trainer.paused"),
    ResumeTrainer: ("trainer.resuming", "trainer.resumed"),
    RestartTrainer: ("trainer.restarting", "trainer.restarted"),
    ParkTrainer: ("trainer.parking", "trainer.parked"),
    UnparkTrainer: ("trainer.unparking", "trainer.unparked"),
    RestoreTrainer: ("trainer.restoring", "trainer.loaded"),
    RestartServer: ("server.restarting", "server.restarted"),
    AbandonServer: ("server.abandoning", "server.abandoned"),
    LoadWeights: ("server.loading", "server.loaded"),
    AdmitServer: ("server.probing", "server.ready"),
    LeaveServer: ("server.leaving", LEFT),
    Halt: ("run.halting", "run.halted"),
}
"""The event that records that an action was begun, and the one that records that it was done."""


def server_names(servers: int) -> tuple[str, ...]:
    """The servers that a run of so many is to have."""
    return tuple(f"server-{index}" for index in range(servers))


def index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


class RunHistory:
    """`memory` changes only through the methods that write down why. Used on one asyncio loop."""

    def __init__(self, journal: Journal, memory: RunMemory, file: MemoryFile) -> None:
        self.memory = memory
        self._journal = journal
        self._file = file
        self._is_saving = False
        self._end: RunState | None = None

    @property
    def state(self) -> RunState:
        return self._end or self.memory.state

    @property
    def attempts(self) -> list[RepairAttempt]:
        return self.memory.attempts

    @property
    def lineage(self) -> int:
        return self.memory.lineage

    @property
    def refusal(self) -> Refusal | None:
        """What the disk answered to the memory, None where it has taken it."""
        return self._file.refusal

    @property
    def incidents(self) -> IncidentMemory:
        return self.memory.incidents

    @property
    def command_events(self) -> Sequence[Mapping[str, Any]]:
        return self.memory.command_events or ()

    # ── the disk ──

    async def flush(self) -> None:
        """Returns when everything that was decided so far is on the disk, or was refused by it."""
        self.save()
        await self._journal.flush()

    async def flush_in_time(self) -> None:
        """As `flush`, for at most FLUSH_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.flush()

    async def secure(self) -> None:
        """As `flush`, and raises RunError where the memory is not on the disk: one that takes over would not know."""
        await self.flush()
        if self._file.problem is not None:
            raise self._file.problem

    def save(self) -> None:
        """Write the memory behind the lines of its events, where it has changed since, or was refused by the disk."""
        self._is_saving = False
        content = self._file.changed(self.memory)
        if content is not None:
            self._journal.then(partial(self._file.write_content, content))

    def _save_soon(self) -> None:
        """Once the loop's present turn is over: half of what it decides is nothing to continue from."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a thread, or before the loop
            self.save()
            return
        if not self._is_saving:
            self._is_saving = True
            loop.call_soon(self.save)

    # ── the run ──

    def placed(self, node: str) -> None:
        """A Coordinator has its place on a node, and is the only one from now on."""
        self._journal.record(
            "coordinator.placed", subject="coordinator", reason="on its node", node=node, pid=os.getpid()
        )
        self.memory.coordinator_nodes.add(node)
        self.save()

    def begin(self, reason: str = "servers and trainer are starting") -> None:
        self.memory.was_begun = True
        self._record("run.initializing", reason=reason, pid=os.getpid())

    def adopt(self, what: str) -> None:
        self._record("coordinator.adopted", subject="coordinator", reason=what, pid=os.getpid())

    def enter(self, state: RunState, reason: str) -> None:
        """A change of state is reported once; the final one by the driver."""
        if state is self.state:
            return
        if state in ENDS:  # kept here alone: one that takes over before the driver has heard of it ends the run again
            self._end = state
            return
        self.memory.state = state
        self._record(f"run.{state.lower()}", reason=reason, state=state)

    def attempted(self, attempt: RepairAttempt) -> None:
        memory, facts = self.memory, dataclasses.asdict(attempt)
        memory.attempts = [*memory.attempts, attempt]
        if attempt.subject == TRAINER:  # a server's, of the same turn, must not take the place of the restore's
            memory.next_booked = len(memory.attempts) - 1 if attempt.restored_step is not None else None
        reason = f"counts against the restart budget of {attempt.cause} ({attempt.rung})"
        self._record("repair.begun", subject=facts.pop("subject"), reason=reason, **facts)

    def lost_restore(self) -> None:
        reason = "the Coordinator that ordered a restore was killed, and nothing stepped from there: it does not count"
        self.not_restored(reason)

    def not_restored(self, reason: str) -> None:
        """The trainer has loaded nothing of what was ordered last."""
        memory = self.memory
        memory.is_restoring = False
        memory.attempts = [one for place, one in enumerate(memory.attempts) if place != memory.booked]
        memory.booked = None
        self._record("repair.not_tried", subject=TRAINER, reason=reason)

    def proved_by(self, subject: str, next_step: int, now: float) -> None:
        memory = self.memory
        memory.proved[subject] = now
        memory.furthest = max(memory.furthest, next_step)
        if not memory.is_restoring and memory.next_booked is None:  # else a place in the list is that restore's
            memory.booked = None
            memory.attempts = still_counted(memory.attempts, memory.proved, memory.abandoned | memory.left)
        self._record("repair.proved", subject=subject, reason="the run got further", next_step=next_step, at=now)

    def begun(self, action: Action) -> None:
        memory, facts = self.memory, dataclasses.asdict(action)
        match action:
            case RestoreTrainer():
                facts["lineage"] = memory.lineage = memory.lineage + 1
                memory.is_restoring = True
                memory.booked = memory.next_booked
                memory.next_booked = None
            case ResumeTrainer():  # nobody has it step before what it is to step from is loaded
                memory.is_restoring = False
            case RestartServer(overrides=overrides) | RestartTrainer(overrides=overrides):
                memory.overrides.update(overrides)
            case Halt() if memory.ending is None:  # whoever begins it again no longer knows why it was begun
                memory.ending = action.word
                memory.ending_reason = action.reason
                memory.ending_may_pass = action.may_pass
                memory.reinstate_after = action.reinstate_after
        self._record_action(EVENTS[type(action)][0], action, facts)

    def done(self, action: Action, facts: Mapping[str, object], seconds: float) -> None:
        match action:
            case RestoreTrainer():
                self.memory.is_restoring = False
            case AdmitServer(name=name):
                self.memory.served.add(name)
            case AbandonServer(name=name):
                self.memory.abandoned.add(name)
            case LeaveServer(name=name):
                self._forget_server(name)
        self._record_action(EVENTS[type(action)][1], action, dataclasses.asdict(action) | dict(facts), seconds=seconds)

    def failed(self, action: Action, reason: str, seconds: float) -> None:
        memory, facts = self.memory, dataclasses.asdict(action) | {"reason": reason}
        if isinstance(action, RestoreTrainer):
            memory.is_restoring = False
            if memory.booked is not None:
                memory.attempts = restored_nothing(memory.attempts, action.global_step)
                memory.booked = None
        self._record_action(f"{EVENTS[type(action)][0]}_failed", action, facts, seconds=seconds)

    def started_server(self, name: str, generation: int, weight_version: int, lineage: int | None) -> Overrides:
        """Returns the settings that gave way so far, with which it is to start."""
        memory, overrides = self.memory, dict(self.memory.overrides)
        memory.generations[name] = generation
        memory.start_lineages[name] = lineage
        memory.started_with[name] = overrides
        memory.abandoned.discard(name)
        memory.left.discard(name)
        self._record(
            "server.starting",
            subject=name,
            generation=generation,
            weight_version=weight_version,
            lineage=lineage,
            with_overrides=overrides,
        )
        return overrides

    def started_trainer(self) -> Overrides:
        overrides = self.memory.started_with[TRAINER] = dict(self.memory.overrides)
        self._record("trainer.starting", subject="trainer", with_overrides=overrides)
        return overrides

    async def took_over(self, actor: str) -> None:
        """`actor` is the trainer from now on; on the disk before it gets an order."""
        self.memory.trainer_actor = actor
        self._record(TOOK_OVER, subject=TRAINER, reason="it was parked", actor=actor)
        await self.flush()

    def found_damaged(self, global_step: int, made_at: Sequence[float], reason: str) -> None:
        """`made_at`: which one, since the steps after the one that is restored instead will bring another."""
        known, subject = self.memory.damaged_checkpoints, f"step {global_step}"
        known[global_step] = known.get(global_step, frozenset()) | frozenset(made_at)
        self._record("checkpoint.damaged", subject=subject, reason=reason, global_step=global_step, made_at=made_at)

    def put_back(self, event: str, after_step: int, names: Sequence[str], reason: str) -> None:
        """What a restore to `after_step` had set aside, or not, as the reason of the run's end then says."""
        if self.memory.reinstate_after is not None:
            self.memory.ending_reason += f"; {reason}"
            self.memory.reinstate_after = None
        self._record(event, subject="checkpoint", reason=reason, after_step=after_step, checkpoints=list(names))

    def took_restore(self, facts: Mapping[str, Any]) -> None:
        """A person's restore was carried out: whoever takes over before its request is removed need not do it again."""
        self.memory.restore_taken = max(self.memory.restore_taken, facts["restore_count"])
        self._record(TAKEN, **facts)

    def ran_out(self, subject: str, tried: TriedSettings, reason: str) -> None:
        self.memory.tried.append(tried)
        self._record(
            "memory.ran_out",
            subject=subject,
            reason=reason,
            ran_out=tried.ran_out,
            settings=dataclasses.asdict(tried.settings),
        )

    def remembered(self, kept: RememberedSettings, reason: str) -> None:
        """What earlier attempts learnt on this host holds from the first start on."""
        self.memory.overrides.update(kept.overrides)
        self.memory.tried += kept.tried
        tried = [{"ran_out": one.ran_out, "settings": dataclasses.asdict(one.settings)} for one in kept.tried]
        self._record("memory.remembered", subject="memory", reason=reason, overrides=dict(kept.overrides), tried=tried)

    def asked_to_abort(self, reason: str) -> None:
        if not self.memory.abort_reason:
            self.memory.abort_reason = reason
            self._record("run.abort_asked", subject="user", reason=reason)

    def asked_to_hold(self, reason: str) -> None:
        """`reason` "": no longer."""
        if reason == self.memory.hold_reason:
            return
        self.memory.hold_reason = reason
        name = "run.hold_asked" if reason else "run.hold_released"
        self._record(name, subject="user", reason=reason or "it may continue")

    def asked_to_resize(self, servers: int, reason: str) -> None:
        self.memory.servers = servers
        self._record(RESIZED, subject="fleet", reason=reason, servers=servers)

    def server_left(self, name: str, reason: str) -> None:
        """Its actor ended while no Coordinator looked."""
        self._forget_server(name)
        self._record(LEFT, subject=name, reason=reason, moved=0)

    def _forget_server(self, name: str) -> None:
        self.memory.left.add(name)
        self.memory.served.discard(name)

    def node_joined(self, node: str, address: str) -> None:
        self.memory.nodes.add(node)
        self._record("node.joined", subject=address, reason="it is of the cluster", node=node)

    def node_lost(self, node: str, address: str, reason: str, held: Sequence[str]) -> None:
        self.memory.nodes.discard(node)
        self._record("node.lost", subject=address, reason=reason, node=node, held=held, cause="node_lost")

    def server_died(self, end: ServerExit) -> None:
        number = self.incidents.number_of_death(end.name)
        # Its actor reports no end of one before: a set of all would grow with each death.
        died = {one for one in self.memory.died if one[0] != end.name or one[1] >= end.generation - 1}
        self.memory.died = died | {(end.name, end.generation)}
        self.incidents.reserve(end.name, number)
        self._record(
            "server.died",
            subject=end.name,
            reason=end.reason,
            incident=number,
            pid=end.pid,
            exit_code=end.exit_code,
            generation=end.generation,
            detected_after_s=end.age_s,
        )

    def incident_began(self, trouble: Trouble, doing: str, now: float) -> Mapping[str, object]:
        number = self.incidents.number_to_begin(trouble.subject)
        since = now if trouble.since is None else min(trouble.since, now)
        self.incidents.begin(number, trouble.cause, trouble.subject, since, trouble.onset_step)
        return self._record(
            "incident.began",
            subject=trouble.subject,
            reason=trouble.reason,
            incident=number,
            cause=trouble.cause,
            onset_step=trouble.onset_step,
            doing=doing,
            at=since,
        )

    def incident_joined(self, number: int, rejection: Rejection) -> None:
        self.incidents.joined[rejection.id] = number
        self._record(
            "incident.joined",
            subject="batch",
            reason=rejection.reason,
            incident=number,
            global_step=rejection.global_step,
            rejection=rejection.id,
            cause=rejection.cause,
        )

    def incident_ended(self, ending: Ending, **facts: object) -> Mapping[str, object]:
        one = ending.incident
        self.incidents.end(one.number)
        return self._record(
            "incident.ended",
            subject=one.subject,
            reason=ending.reason,
            incident=one.number,
            cause=one.cause,
            is_mended=ending.is_mended,
            **facts,
        )

    def event(self, name: str, *, subject: str, reason: str, **facts: object) -> None:
        """Something that was seen, and that nothing here depends on."""
        self._record(name, subject=subject, reason=reason, **facts)

    def _record_action(self, event: str, action: Action, facts: dict[str, object], **more: object) -> None:
        subject = str(facts.pop("name", "") or event.partition(".")[0])
        self._record(event, subject=subject, reason=str(facts.pop("reason", "")), **facts, **more)

    def _record(self, event: str, *, subject: str = "", reason: str = "", **facts: Any) -> Mapping[str, object]:
        """Written with the number of the incident that it belongs to, if any."""
        step, number = facts.pop("global_step", None), facts.pop("incident", None)
        line = self._journal.record(
            event,
            subject=subject,
            reason=reason,
            global_step=step if isinstance(step, int) else None,
            incident=self.incidents.number_for(event, subject) if number is None else number,
            **facts,
        )
        self.memory.keep_event(line)
        self._save_soon()
        return line


def furthest_step(metrics: Path, attempt: int) -> int:
    """The step after the last that this attempt has committed, as far as the end of its metrics shows. Undone ones
    count, and a Coordinator that takes over has no time to read a week's steps: it is not the fold's."""
    size = metrics.stat().st_size if metrics.exists() else 0
    lines = LineTail(metrics, since=max(0, size - LAST_BYTES)).read()
    steps = [line.get("global_step") for line in lines if line.get("attempt") == attempt]
    return 1 + max((step for step in steps if isinstance(step, int)), default=-1)


class ProgressTracker:
    """How far a run has got, and with which servers: a new highest step resets the restart budgets
    (launcher/policy/restart_budget.py). `furthest`: the step after the last one that this attempt has ever committed.

    That a repair was followed by progress is written down, once for each; so a Coordinator that takes over neither
    forgets the repairs that have not helped yet, nor counts those that have. Nor does it count a restore that was
    ordered by a Coordinator that was killed, where the order never reached the trainer or the trainer ended too: what
    takes its place is not a second one, and no second collapse at the same place.
    """

    def __init__(self, history: RunHistory, furthest: int = 0) -> None:
        self._history = history
        self._furthest = max(furthest, history.memory.furthest)
        self._at: dict[str, float] = dict(history.memory.proved)

    def at(self, subject: str) -> float | None:
        """When the run last got further than ever before, with the help of `subject`."""
        return self._at.get(subject)

    def note(self, next_step: int, helpers: Collection[str], now: float) -> None:
        """`helpers`: the servers whose tokens these were. The trainer has its part in every step."""
        if next_step <= self._furthest:
            return
        self._furthest = next_step
        for subject in (TRAINER, *helpers):
            if self._history.memory.owes_proof(subject):
                self._history.proved_by(subject, next_step, now)
            self._at[subject] = now
