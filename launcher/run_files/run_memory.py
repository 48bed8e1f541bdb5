"""All that a Coordinator must know of its run, in one file: memory.json. One that takes over reads it and continues.

    a decision ─► RunMemory changes ─► memory.json, complete and on the disk ─► what was decided is begun

The driver begins the file of an attempt; the attempt's Coordinator is its only writer from then on. events.jsonl
reports the same decisions to people and tools, and nobody acts on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from launcher.base.clocks import clock_shift
from launcher.base.disk_faults import OF_A_FILE, Refusal, fault_of_file
from launcher.base.durable import refusal_of, replace_file
from launcher.base.errors import DiskError, RunError
from launcher.base.messages import Cause, Health, TerminalStatus
from launcher.policy.incident_policy import OF_LEARNING, OpenIncident
from launcher.policy.memory_backoff import TriedSettings
from launcher.policy.observed import TRAINER, RunState, TrainerFacts
from launcher.policy.restart_budget import RepairAttempt
from launcher.run_files.journal import number_of, plain
from launcher.run_files.run_order import TAKEN
from launcher.run_files.run_paths import RunPaths

MOST_LINES = 200
"""Kept of one incident: a repair that fails for ever would fill the file, and its first lines describe it."""
NOT_OF_ONE = frozenset({"run.initializing", "run.running", "run.abort_asked", "coordinator.adopted", "run.halted"})
"""Events that belong to no incident, although one is open."""

OF_A_COMMAND = frozenset(
    {
        "run.running",
        "trainer.restored",
        "trainer.starting",
        "trainer.stepped",
        "health.reward_collapse",
        "health.nonfinite",
        "health.outside_weights",
        "health.verifier_broken",
        "checkpoint.condemned",
        "checkpoint.found",
        "checkpoint.prepared",
        "checkpoint.reinstated",
        "checkpoint.set_aside",
    }
)
"""Events from which a Coordinator continues whose trainer is another project's command."""
ONLY_NEWEST = frozenset(
    {"run.running", "trainer.starting", "trainer.stepped", "checkpoint.found", "checkpoint.prepared"}
)
"""Of these the last one says all: a command that starts again and again would fill the file. Each of the others is of a
repair, and a repair has its budget."""

Line = Mapping[str, object]
log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class IncidentMemory:
    """The incidents of a run. Their numbers continue over its attempts."""

    last: int = 0  # the highest number so far
    open: dict[int, OpenIncident] = field(default_factory=dict)
    left_open: dict[int, OpenIncident] = field(default_factory=dict)  # by attempts that ended first
    reserved: dict[str, int] = field(default_factory=dict)  # by subject: for deaths that were reported before a look
    lines: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # the events of each, until it has ended
    joined: dict[str, int] = field(default_factory=dict)  # by the id of the rejected batch
    damaged: set[str] = field(default_factory=set)  # checkpoints that had one

    def next_attempt(self) -> IncidentMemory:
        """What is open now belongs to an attempt that has ended."""
        left = {**self.left_open, **self.open}
        lines = {number: self.lines.get(number, []) for number in left}
        return IncidentMemory(last=self.last, left_open=left, lines=lines, damaged=self.damaged)

    def reserve(self, subject: str, number: int) -> None:
        self.last = max(self.last, number)
        if number not in self.open:
            self.reserved[subject] = number

    def begin(self, number: int, cause: Cause, subject: str, since: float, onset_step: int | None = None) -> None:
        self.last = max(self.last, number)
        self.reserved.pop(subject, None)
        self.open[number] = OpenIncident(
            number=number, cause=cause, subject=subject, since=since, onset_step=onset_step
        )
        if cause is Cause.CHECKPOINT_CORRUPT:
            self.damaged.add(subject)

    def end(self, number: int) -> None:
        self.open.pop(number, None)
        self.left_open.pop(number, None)
        self.lines.pop(number, None)

    def keep(self, number: int, line: Line) -> None:
        """An event of an incident that has not ended, for its folder and for the text of its end."""
        if number in self.open or number in self.reserved.values():
            kept = self.lines.setdefault(number, [])
            if len(kept) < MOST_LINES:
                kept.append(_plain_line(line))

    def beginning(self, number: int) -> Line:
        """How an open one began. Its first line may be a server's end, which is reported before it."""
        return next(line for line in self.lines[number] if line.get("event") == "incident.began")

    def number_to_begin(self, subject: str) -> int:
        return self.reserved.get(subject, self.last + 1)

    def number_of_death(self, subject: str) -> int:
        """For an exit that is reported before anybody could look: of the open incident, or of the next one."""
        known = self._number_of(subject)
        return self.number_to_begin(subject) if known is None else known

    def number_for(self, event: str, subject: str) -> int | None:
        """Which open incident an event belongs to: its subject's own, else the trainer's, whose repair concerns all."""
        if event in NOT_OF_ONE:
            return None
        own = self._number_of(subject)
        if own is not None:
            return own
        if subject in self.reserved:
            return self.reserved[subject]
        learning = [number for number, one in self.open.items() if one.subject in OF_LEARNING]
        if learning:
            return max(learning)
        anybody = event.startswith("run.") and self.open
        return max(self.open) if anybody else None

    def _number_of(self, subject: str) -> int | None:
        return max((number for number, one in self.open.items() if one.subject == subject), default=None)


@dataclass(slots=True, kw_only=True)
class RunMemory:
    """The decisions of one attempt; of those before it the incidents. Times are on the clock of this node."""

    attempt: int
    was_begun: bool = False
    state: RunState = RunState.INITIALIZING
    # servers, by name
    servers: int | None = None  # how many there are to be; None: as the run began
    generations: dict[str, int] = field(default_factory=dict)
    start_lineages: dict[str, int | None] = field(default_factory=dict)  # of the weights that each started from
    died: set[tuple[str, int]] = field(default_factory=set)  # generations whose end is recorded
    abandoned: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)  # those that have had traffic
    left: set[str] = field(default_factory=set)  # those that were taken away
    # settings that gave way, of servers and of the trainer
    overrides: dict[str, float | int | bool] = field(default_factory=dict)
    started_with: dict[str, dict[str, float | int | bool]] = field(default_factory=dict)
    tried: list[TriedSettings] = field(default_factory=list)
    # the trainer
    trainer_actor: str = TRAINER
    lineage: int = 0  # how many restores were ordered
    is_restoring: bool = False
    damaged_checkpoints: dict[int, frozenset[float]] = field(default_factory=dict)  # by step, when they were made
    # repairs, and how far the run got
    attempts: list[RepairAttempt] = field(default_factory=list)
    booked: int | None = None  # the place in `attempts` of the restore under way; None: a start's load
    next_booked: int | None = None  # of the restore that is ordered next
    proved: dict[str, float] = field(default_factory=dict)  # by subject, when the run first got further after a repair
    furthest: int = 0
    # nodes, by Ray's id
    nodes: set[str] = field(default_factory=set)
    coordinator_nodes: set[str] = field(default_factory=set)
    # the end, and what a person asked for
    hold_reason: str = ""
    abort_reason: str = ""
    ending: TerminalStatus | None = None
    ending_reason: str = ""
    ending_may_pass: bool = False
    restore_taken: int = 0  # the highest number of a person's restores that this attempt has carried out
    reinstate_after: int | None = None  # of the halt under way: the restore, to this step, that it is to take back
    incidents: IncidentMemory = field(default_factory=IncidentMemory)
    # of another project's trainer, over all attempts; None: the trainer is the launcher's
    command_events: list[dict[str, Any]] | None = None

    def keep_event(self, line: Line) -> None:
        """For the incident that it belongs to, and for what is to be known of a command."""
        if isinstance(number := line.get("incident"), int):
            self.incidents.keep(number, line)
        if self.command_events is not None and line.get("event") in OF_A_COMMAND:
            keep_command_event(self.command_events, line)

    def catch_up(self, events: Iterable[Line], *, is_here: bool) -> None:
        """What the journal has, and this memory not yet: it is written behind the journal, and a kill came between the
        two. Incidents that are begun again would have the same number, and a person's restore would be done twice.
        `is_here`: on this node's clock."""
        begun: dict[int, Line] = {}
        for line in events:
            if line.get("attempt") != self.attempt:
                continue
            match line.get("event"), line.get("incident"), line.get("restore_count"):
                case "incident.began", int(number), _:
                    begun[number] = line
                case "incident.ended", int(number), _:
                    begun.pop(number, None)
                    self.incidents.end(number)
                case name, _, int(count) if name == TAKEN:
                    self.restore_taken = max(self.restore_taken, count)
        now = time.monotonic()
        for number, line in begun.items():
            cause = str(line.get("cause"))  # of a damaged line it may be a list
            if number not in self.incidents.open and cause in set(Cause):
                since = number_of(line.get("at"), now) if is_here else now
                onset = line.get("onset_step")
                self.incidents.begin(
                    number,
                    Cause(cause),
                    str(line.get("subject")),
                    min(since, now),
                    onset if isinstance(onset, int) else None,
                )
                self.incidents.keep(number, line)

    def owes_proof(self, subject: str) -> bool:
        """It was repaired since the run last got further with its help."""
        since = self.proved.get(subject, float("-inf"))
        return any(one.subject == subject and one.at > since for one in self.attempts)

    def has_lost_a_restore(self, trainer: TrainerFacts) -> bool:
        """While none is under way: the last one was ordered, and the trainer holds what it held before, or has ended
        before it stepped from there. A command always has: it ended with the Coordinator that ordered the restore; the
        lineage that is seen of it is its door's, which no restore changes."""
        is_known = trainer.is_loaded or trainer.verdict.health is Health.DEAD
        return self.is_restoring and is_known and (trainer.is_command or trainer.lineage < self.lineage)

    def shift_clock(self, seconds: float) -> None:
        """Put the times on a clock that is `seconds` ahead."""
        self.proved = {subject: at + seconds for subject, at in self.proved.items()}
        self.attempts = [dataclasses.replace(one, at=one.at + seconds) for one in self.attempts]
        opened = self.incidents.open
        self.incidents.open = {n: dataclasses.replace(one, since=one.since + seconds) for n, one in opened.items()}


def keep_command_event(kept: list[dict[str, Any]], line: Line) -> None:
    """Adds a line that is OF_A_COMMAND. It takes the place of an older one where only the newest counts."""
    if (name := line["event"]) in ONLY_NEWEST:
        kept[:] = [one for one in kept if one["event"] != name]
    kept.append(_plain_line(line))


def _plain_line(line: Line) -> dict[str, Any]:
    return {name: plain(value) for name, value in line.items()}


@dataclass(slots=True, kw_only=True)
class _Written:
    """The content of memory.json, and on which node's clock its times are."""

    node: str
    monotonic: float
    wall: float
    memory: RunMemory


@dataclass(slots=True, kw_only=True)
class _Attempt:
    attempt: int


@dataclass(slots=True, kw_only=True)
class _WrittenBy:
    """Of `_Written` no more than whose it is."""

    memory: _Attempt


class MemoryFile:
    """`node`: Ray's id of this node, "" for the driver. `writer`: the node of whoever wrote what was read last.
    `problem`: why the newest content is not on the disk, None where it is; `refusal`: where that is the disk's."""

    def __init__(self, path: Path, node: str = "") -> None:
        self.path = path
        self.writer = ""
        self._node = node
        self.problem: RunError | None = None
        self.refusal: Refusal | None = None
        self._attempt = 0
        self._newest = b""

    def read(self, attempt: int) -> RunMemory:
        """What the driver, or a Coordinator, of this attempt has written, on this node's clock. Raises RunError where
        there is nothing else: to begin anew would restart what runs, and spend its budgets again."""
        try:
            found = self._decoded()
        except (OSError, msgspec.MsgspecError) as error:
            raise RunError(f"{self.path} can't be read: {error}", "the same command begins a new one") from error
        memory = found.memory
        if memory.attempt != attempt:
            whose = f"of attempt {memory.attempt}, not of attempt {attempt}"
            raise RunError(f"{self.path} is {whose}", "end the other command that uses this run's folder")
        self.writer = found.node
        return self._on_this_clock(found)

    def begin(self, attempt: int, *, last_incident: int = 0, of_a_command: Iterable[Line] | None = None) -> str:
        """Another attempt begins: it continues the numbers of incidents, and is to end those that were left open.
        `last_incident`: the highest number in the journal. `of_a_command`: the lines there from which a Coordinator
        of another project's trainer continues where nothing remembers them; None: the trainer is the launcher's.

        Returns why the attempts before it are forgotten, "" where they are not. Raises OSError."""
        why, has_command = "", of_a_command is not None
        try:
            before = self._decoded().memory
            incidents, command = before.incidents.next_attempt(), before.command_events or []
        except (OSError, msgspec.MsgspecError) as error:
            incidents, command = IncidentMemory(), [_plain_line(line) for line in of_a_command or ()]
            why = "" if isinstance(error, FileNotFoundError) else f"{self.path} can't be read: {error}"
        # The journal is ahead where a kill came before the memory: a number given twice has one folder for two.
        incidents.last = max(incidents.last, last_incident)
        self._attempt = attempt
        begun = RunMemory(attempt=attempt, incidents=incidents, command_events=command if has_command else None)
        self._replace(_encoded(begun))
        return why

    def last(self) -> RunMemory | None:
        """Of whichever attempt wrote it last, on this clock, for the driver; None where nobody can tell."""
        try:
            return self._on_this_clock(self._decoded())
        except (OSError, msgspec.MsgspecError):
            return None

    def write(self, memory: RunMemory) -> None:
        """Returns when it is on the disk. Raises OSError, and RunError where another attempt has begun."""
        self._attempt = memory.attempt
        self._replace(_encoded(memory))

    def changed(self, memory: RunMemory) -> bytes | None:
        """What `write_content` is to write, None where nothing has changed since it was last asked."""
        content = _encoded(memory)
        if content == self._newest:
            return None
        self._newest = content
        self._attempt = memory.attempt
        return content

    def write_content(self, content: bytes) -> None:
        """On a thread. A disk that refuses it does not end the run: the next change, or the next look at what waits,
        tries again."""
        if self._newest not in (content, b""):  # a newer one waits behind it, as after a disk that stalled
            return
        try:
            self._replace(content)
        except OSError as error:
            what = f"{self.path} can't be written: {error.strerror or error}"
            problem = DiskError(what, "make room on its disk, or check its permissions")
            problem.__cause__ = error
            fault = fault_of_file(problem)
            file = str(self.path) if fault in OF_A_FILE else ""
            self._not_written(problem, refusal_of(self.path.parent, fault, needed=len(content), file=file))
        except RunError as error:
            self._not_written(error, None)
        else:
            self.problem = None
            self.refusal = None

    def _not_written(self, problem: RunError, refusal: Refusal | None) -> None:
        self._newest = b""
        if self.problem is None:
            log.warning("%s; it is tried again", problem.message)
        self.problem = problem
        self.refusal = refusal

    def _replace(self, content: bytes) -> None:
        head = {"node": self._node, "monotonic": time.monotonic(), "wall": time.time(), "memory": msgspec.Raw(content)}
        replace_file(self.path, msgspec.json.encode(head), check=self._check_attempt)

    def _check_attempt(self) -> None:
        """A Coordinator whose driver was killed lives on for a moment: what it writes then would take the place of the
        next attempt's memory, which could not begin. Raises RunError."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # none, or damaged: this one is better
            newest = msgspec.json.decode(self.path.read_bytes(), type=_WrittenBy).memory.attempt
            if newest > self._attempt:
                raise RunError(f"{self.path} is of attempt {newest}, which has taken the place of {self._attempt}")

    def _on_this_clock(self, found: _Written) -> RunMemory:
        if found.node != self._node:  # of this node, whose wall clock may have been set meanwhile, they are exact
            theirs = found.monotonic + (time.time() - found.wall)
            found.memory.shift_clock(clock_shift(theirs, time.monotonic()))
        return found.memory

    def _decoded(self) -> _Written:
        return msgspec.json.decode(self.path.read_bytes(), type=_Written)


def _encoded(memory: RunMemory) -> bytes:
    try:
        return msgspec.json.encode(memory)
    except UnicodeEncodeError:  # a file name that is no Unicode, in a reason: it would end the Coordinator each turn
        return msgspec.json.encode(_in_unicode(msgspec.to_builtins(memory)))


def _in_unicode(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_in_unicode(key): _in_unicode(item) for key, item in value.items()}
        case list():
            return [_in_unicode(item) for item in value]
    return value


def memory_file(paths: RunPaths) -> MemoryFile:
    """As the driver reads and writes it."""
    return MemoryFile(paths.run_memory)
