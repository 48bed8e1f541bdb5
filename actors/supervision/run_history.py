"""The decisions of this attempt so far: written to the journal as they are made, and read back from there.

One function, `_take`, applies an event to the state, both when it is written and when a restarted Coordinator reads it
again. So its memory can't differ from its predecessor's.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.cluster.node_identity import event_on_this_clock
from actors.supervision.event_facts import EVENTS, list_of, number_of, numbers_of, optional_number, tried_of
from actors.supervision.fleet_record import FleetRecord
from actors.supervision.incident_history import BEGAN, ENDED, JOINED, IncidentHistory
from actors.supervision.progress_tracker import ATTEMPT, NOT_TRIED, PROVED, RepairRecord
from launcher.base.messages import Overrides, Rejection, ServerExit, TerminalStatus
from launcher.policy.actions import Action, RestoreTrainer
from launcher.policy.incident_policy import Ending, Trouble
from launcher.policy.memory_backoff import TriedSettings
from launcher.policy.reconcile_trainer import TRAINER
from launcher.policy.restart_budget import RepairAttempt
from launcher.policy.run_state import ENDS, RunState
from launcher.resources.memory_history import RememberedSettings
from launcher.run_files.journal import Journal, read_lines

REMEMBERED = "memory.remembered"
TOOK_OVER = "trainer.took_over"


class RunHistory:
    """`state` and all else here change only through the methods that write them down."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.state = RunState.INITIALIZING
        self.state_reason = ""
        self.generations: dict[str, int] = {}
        self.start_lineages: dict[str, int | None] = {}
        self.overrides: dict[str, float | int | bool] = {}
        self.started_with: dict[str, Overrides] = {}
        self.damaged_checkpoints: dict[int, frozenset[float]] = {}  # by step, when they were made
        self.abandoned: set[str] = set()
        self.trainer_actor = TRAINER
        self.died: set[tuple[str, int]] = set()
        self.tried: list[TriedSettings] = []
        self.abort_reason = self.hold_reason = ""
        self.nodes: set[str] = set()
        self.coordinator_nodes: set[str] = set()
        self.ending: TerminalStatus | None = None
        self.ending_reason = ""
        self.ending_may_pass = False
        self.was_begun = False
        self.incidents = IncidentHistory()
        self.repairs = RepairRecord()
        self.fleet = FleetRecord()

    @classmethod
    def read(
        cls, journal: Journal, path: Path, attempt: int, *, clock: Callable[[], float] | None = None, node: str = ""
    ) -> RunHistory:
        """What the events of this attempt record, and of earlier ones their incidents. Raises JournalError.

        `clock`: that of this `node`, onto which times are put that a Coordinator wrote down on another one. Those of
        this node stay as they are: the wall clock, by which the others are compared, may have been set meanwhile, and
        a repair would wait for the hour by which it was.
        """
        history = cls(journal)
        is_mine, writer = False, None
        for line in read_lines(path):
            writer = line.get("node") if line.get("event") == "coordinator.placed" else writer
            event: Mapping[str, object] = line
            if clock is not None and writer != node:
                event = event_on_this_clock(line, now=clock(), wall=time.time())
            if event.get("attempt") == attempt:
                if not is_mine:
                    history.incidents.next_attempt()
                is_mine = True
                history._take(event)
            else:
                history.incidents.take(event)
        if not is_mine:
            history.incidents.next_attempt()
        return history

    @property
    def attempts(self) -> list[RepairAttempt]:
        return self.repairs.attempts

    @property
    def lineage(self) -> int:
        return self.repairs.lineage

    # ── writing ──

    async def flush(self) -> None:
        """Returns when everything that was decided so far is on the disk; nothing is done on a decision before."""
        await self._journal.flush()

    def begin(self, reason: str = "servers and trainer are starting") -> None:
        self._record("run.initializing", reason=reason, pid=os.getpid())

    def adopt(self, what: str) -> None:
        self._record("coordinator.adopted", subject="coordinator", reason=what, pid=os.getpid())

    def enter(self, state: RunState, reason: str) -> None:
        """A change of state is written once; the driver writes the final one."""
        if state is self.state:
            return
        if state in ENDS:
            self.state = state
            return
        self._record(f"run.{state.lower()}", reason=reason, state=state)

    def attempted(self, attempt: RepairAttempt) -> None:
        facts = dataclasses.asdict(attempt)
        reason = f"counts against the restart budget of {attempt.cause} ({attempt.rung})"
        self._record(ATTEMPT, subject=facts.pop("subject"), reason=reason, **facts)

    def lost_restore(self) -> None:
        reason = "the Coordinator that ordered a restore was killed, and nothing stepped from there: it does not count"
        self._record(NOT_TRIED, subject=TRAINER, reason=reason)

    def proved_by(self, subject: str, next_step: int, now: float) -> None:
        self._record(PROVED, subject=subject, reason="the run got further", next_step=next_step, at=now)

    def begun(self, action: Action) -> None:
        facts = dataclasses.asdict(action)
        if isinstance(action, RestoreTrainer):
            facts["lineage"] = self.lineage + 1
        self._record_action(EVENTS[type(action)][0], action, facts)

    def done(self, action: Action, facts: Mapping[str, object], seconds: float) -> None:
        self._record_action(EVENTS[type(action)][1], action, dataclasses.asdict(action) | dict(facts), seconds=seconds)

    def failed(self, action: Action, reason: str, seconds: float) -> None:
        facts = dataclasses.asdict(action) | {"reason": reason}
        self._record_action(f"{EVENTS[type(action)][0]}_failed", action, facts, seconds=seconds)

    def started_server(self, name: str, generation: int, weight_version: int, lineage: int | None) -> Overrides:
        """Returns the settings that gave way so far, with which it is to start."""
        overrides = dict(self.overrides)
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
        overrides = dict(self.overrides)
        self._record("trainer.starting", subject="trainer", with_overrides=overrides)
        return overrides

    async def took_over(self, actor: str) -> None:
        """`actor` is the trainer from now on; on the disk before it gets an order."""
        self._record(TOOK_OVER, subject=TRAINER, reason="it was parked", actor=actor)
        await self.flush()

    def found_damaged(self, global_step: int, made_at: Sequence[float], reason: str) -> None:
        """`made_at`: which one, since the steps after the one that is restored instead will bring another."""
        subject = f"step {global_step}"
        self._record("checkpoint.damaged", subject=subject, reason=reason, global_step=global_step, made_at=made_at)

    def ran_out(self, subject: str, tried: TriedSettings, reason: str) -> None:
        self._record(
            "memory.ran_out",
            subject=subject,
            reason=reason,
            ran_out=tried.ran_out,
            settings=dataclasses.asdict(tried.settings),
        )

    def remembered(self, kept: RememberedSettings, reason: str) -> None:
        """What earlier attempts learnt on this host holds from the first start on."""
        tried = [{"ran_out": one.ran_out, "settings": dataclasses.asdict(one.settings)} for one in kept.tried]
        self._record(REMEMBERED, subject="memory", reason=reason, overrides=dict(kept.overrides), tried=tried)

    def asked_to_abort(self, reason: str) -> None:
        if not self.abort_reason:
            self._record("run.abort_asked", subject="user", reason=reason)

    def asked_to_hold(self, reason: str) -> None:
        """`reason` "": no longer."""
        if reason and reason != self.hold_reason:
            self._record("run.hold_asked", subject="user", reason=reason)
        elif not reason and self.hold_reason:
            self._record("run.hold_released", subject="user", reason="it may continue")

    def server_died(self, end: ServerExit, detected_after_s: float) -> None:
        self._record(
            "server.died",
            subject=end.name,
            reason=end.reason,
            incident=self.incidents.number_of_death(end.name),
            pid=end.pid,
            exit_code=end.exit_code,
            generation=end.generation,
            detected_after_s=detected_after_s,
        )

    def incident_began(self, trouble: Trouble, doing: str, now: float) -> Mapping[str, object]:
        return self._record(
            BEGAN,
            subject=trouble.subject,
            reason=trouble.reason,
            incident=self.incidents.number_to_begin(trouble.subject),
            cause=trouble.cause,
            onset_step=trouble.onset_step,
            doing=doing,
            at=now if trouble.since is None else min(trouble.since, now),
        )

    def incident_joined(self, number: int, rejection: Rejection) -> None:
        self._record(
            JOINED,
            subject="batch",
            reason=rejection.reason,
            incident=number,
            global_step=rejection.global_step,
            rejection=rejection.id,
            cause=rejection.cause,
        )

    def incident_ended(self, ending: Ending, **facts: object) -> Mapping[str, object]:
        one = ending.incident
        return self._record(
            ENDED,
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
        self._take(line)
        return line

    # ── understanding, the same now and after a restart ──

    def _take(self, event: Mapping[str, object]) -> None:
        self.incidents.take(event)
        self.repairs.take(event)
        self.fleet.take(event)
        name, subject = str(event.get("event", "")), str(event.get("subject", ""))
        kind, _, what = name.partition(".")
        if kind == "run" and what.upper() in RunState.__members__ and RunState(what.upper()) not in ENDS:
            self.was_begun = True
            self.state, self.state_reason = RunState(what.upper()), str(event.get("reason", ""))
        match name:
            case "memory.remembered":
                self._override(event)
                self.tried += [tried_of(one) for one in list_of(event, "tried")]
            case "trainer.starting":
                self._started(subject, event)
            case "trainer.took_over":
                self.trainer_actor = str(event.get("actor"))
            case "server.starting":
                self._started(subject, event)
                self.abandoned.discard(subject)
                self.generations[subject] = int(number_of(event, "generation"))
                self.start_lineages[subject] = optional_number(event, "lineage")
            case "server.died":
                self.died.add((subject, int(number_of(event, "generation"))))
            case "server.abandoned":
                self.abandoned.add(subject)
            case "server.restarting" | "trainer.restarting":
                self._override(event)
            case "checkpoint.damaged":
                step, known = int(number_of(event, "global_step")), self.damaged_checkpoints
                known[step] = known.get(step, frozenset()) | numbers_of(event, "made_at")
            case "memory.ran_out":
                self.tried.append(tried_of(event))
            case "run.abort_asked":
                self.abort_reason = str(event.get("reason", ""))
            case "node.joined":
                self.nodes.add(str(event.get("node")))
            case "node.lost":
                self.nodes.discard(str(event.get("node")))
            case "coordinator.placed":
                self.coordinator_nodes.add(str(event.get("node")))
            case "run.hold_asked":
                self.hold_reason = str(event.get("reason", ""))
            case "run.hold_released":
                self.hold_reason = ""
            case "run.halting":
                if self.ending is None:  # whoever begins it again after a restart no longer knows why it was begun
                    self.ending = TerminalStatus(str(event.get("word")))
                    self.ending_reason = str(event.get("reason", ""))
                    self.ending_may_pass = bool(event.get("may_pass"))

    def _started(self, subject: str, event: Mapping[str, object]) -> None:
        overrides = event.get("with_overrides")
        self.started_with[subject] = overrides if isinstance(overrides, Mapping) else {}

    def _override(self, event: Mapping[str, object]) -> None:
        overrides = event.get("overrides")
        if isinstance(overrides, Mapping):
            self.overrides.update(overrides)
