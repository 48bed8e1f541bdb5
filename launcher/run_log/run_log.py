"""One pass over a run's metrics.jsonl and events.jsonl: steps, restores, incidents, checkpoints, states and attempts.

Every tool that needs one of these asks this class, so that no two tools can contradict each other. Lines are taken one
by one, in the order of their file, so that a live run is followed by taking more. What belongs to which restore is
decided by attempt, lineage and line, never by wall time alone: a clock may be set back while a run goes on.

A line that is not what its file holds is left out and counted; a value of the wrong type counts as missing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from launcher.base.messages import EvalReport
from launcher.base.utc_offsets import DAY_S, Offsets
from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_ends import ENDS, FINISHED, STARTED
from launcher.run_files.run_order import (
    OF_A_RESTORE,
    OUTSIDE_WEIGHTS,
    RESTORED,
    TAKEN,
    UNDOING,
    PlacedEvent,
    Places,
    place_events,
)
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.file_follower import FileFollower, check_readable
from launcher.run_log.incident_facts import IncidentFacts, RecordedIncident, incidents_of
from launcher.run_log.last_attempt import SERVER_STATES, LastAttempt
from launcher.run_log.line_values import as_attempt, as_float, as_integer, as_unix_time
from launcher.run_log.run_clock import AttemptSpan, AttemptTimes
from launcher.run_log.set_aside import SetAside
from launcher.run_log.step_line import StepLine, SteppedBack, standing_steps

GLOBAL_STEP = re.compile(r"globalstep(\d{1,15})(?!\d)")
LONGEST_TEXT = 2000  # what nobody reads to its end; a line may have 16 MiB
TEXTS = frozenset({"event", "subject", "reason", "cause", "doing", "state"})
FATES = {
    "checkpoint.pruned": "made room",
    "checkpoint.set_aside": "set aside by a restore",
    "checkpoint.condemned": "condemned",
    "checkpoint.damaged": "damaged",
}
OF_THE_RUN = ("run.", "incident.", "trainer.", "checkpoint.", "eval.", "memory.", "batch.", "server.died")
"""Beginnings of the events that show an attempt at work. Others may come when it is over: messages that are sent."""

PLANNING = ("trainer.started", RESTORED)
"""Say how many prompts an epoch has, and how many steps are planned."""

StateChange = tuple[float, str, str]
"""Unix time, state, reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The trainer went back to `step`."""

    after: int  # lines of steps that were written before
    time: float
    step: int
    steps_back: int  # committed steps that were undone by it
    reason: str
    incident: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A commit. `fate` is "" while it lies where it was committed."""

    step: int
    time: float
    seconds: float
    fate: str = ""


class RunLog:
    """`take_step` takes the lines of metrics.jsonl, `take_event` those of events.jsonl."""

    def __init__(self) -> None:
        self.steps: list[StepLine] = []  # all that were written, undone ones too
        self.incidents: dict[int, RecordedIncident] = {}
        self.checkpoints: list[CheckpointSummary] = []
        self.states: list[StateChange] = []
        self.launches: list[Record] = []  # the `run.started` of each attempt, as it was written
        self.last_attempt = LastAttempt()
        self.set_aside = SetAside()
        self.server_changes: dict[str, list[StateChange]] = {}  # "" at the ends of an attempt and when a server left
        self.last_incident = 0  # the highest number that any event names
        self.batches_rejected = 0
        self.has_started_trainer = False  # in whatever attempt
        self.rebased_step = 0  # rewards before it are no measure of those from it on: new prompts may be harder
        self.prompts: int | None = None  # of an epoch, as the last trainer to start counted them
        self.planned_steps: int | None = None
        self.was_taken_back = False  # by a person, since an attempt began or ended last
        self._saved_step = -1  # the newest checkpoint that was committed since the trainer went back
        self._undoing: list[Record] = []  # each names its step, but for those that take the restore before them back
        self._evals: dict[int, EvalReport] = {}
        self._ends: dict[int, Record] = {}  # by attempt
        self._attempts = AttemptTimes()
        self._run_attempt = 0  # the newest that an event of the run's own is of
        self._places = Places()

    def take_step(self, line: Record) -> bool:
        """Whether it is a step's."""
        step = StepLine.of(line, len(self.steps))
        if step is None:
            return False
        self.steps.append(step)
        self._attempts.extend(step.attempt, step.time)
        return True

    def take_event(self, line: Record) -> bool:
        """Whether it is an event."""
        name = line.get("event")
        if not isinstance(name, str):
            return False
        self.last_incident = max(self.last_incident, as_integer(line.get("incident")) or 0)
        self._take_attempt(line)
        self._take_server(name, line)
        if name == "reward.rebased":
            self.rebased_step = as_integer(line.get("global_step")) or 0
        if not name.startswith(OF_THE_RUN) and name not in UNDOING and name != OUTSIDE_WEIGHTS:
            return True
        event = {key: _kept(key, value) for key, value in line.items() if key != "traceback"}
        if name.startswith(OF_THE_RUN):
            attempt = as_attempt(line.get("attempt"))
            if attempt or not self._run_attempt:  # what never began an attempt adds no time to the last, days ago
                self._attempts.extend(attempt, as_unix_time(line.get("time")))
        self.has_started_trainer |= name == "trainer.starting"
        if name in PLANNING:
            planned = {key: as_integer(line.get(key)) for key in ("prompts", "total_steps")}
            self.prompts = self.prompts if planned["prompts"] is None else planned["prompts"]
            self.planned_steps = self.planned_steps if planned["total_steps"] is None else planned["total_steps"]
        self._take_end(name, line)
        self._take_incident(name, event)
        self._take_checkpoint(name, event)
        self.set_aside.take_event(line)
        self._take_state(name, event)
        if name in UNDOING:
            self._take_undoing(event)
        elif name == OUTSIDE_WEIGHTS and as_integer(line.get("attempt")) is not None:
            self._undoing.append(event)
        elif name == "eval.done":
            self._take_eval(event)
        self.batches_rejected += name == "batch.rejected"
        return True

    def standing(self) -> tuple[tuple[StepLine, ...], tuple[tuple[StepLine, ...], ...]]:
        """The current steps, in order, and those undone, one tuple for each time that steps were."""
        return standing_steps(self.steps, self.stepped_back())

    def stepped_back(self) -> list[SteppedBack]:
        """Each time that steps were undone by going back before them."""
        back = self._gone_back(self._borne_out())
        return [SteppedBack(after=placed.after, step=_step_of(placed.event)) for placed, undone in back if undone]

    def restores(self) -> tuple[Restore, ...]:
        """Each restore after at least one step, also one that was a mistake; a run's first check for something to
        restore is none."""
        placed = [one for one in self._placed() if one.event.get("event") in (RESTORED, OUTSIDE_WEIGHTS)]
        return tuple(
            Restore(
                after=one.after,
                time=as_unix_time(one.event.get("time")),
                step=_step_of(one.event),
                steps_back=undone,
                reason=str(one.event.get("reason") or ""),
                incident=as_integer(one.event.get("incident")),
            )
            for one, undone in self._gone_back(placed)
        )

    def restored_steps(self) -> list[int]:
        """The steps that trainers began from, the first of a run too."""
        return [_step_of(event) for event in self._undoing if event.get("event") == RESTORED]

    def newest_step(self) -> int:
        """The newest that is in the current weights, -1 where none is known: a step's line may be lost where its
        checkpoint is there."""
        last = next(iter(reversed(self._borne_out())), None)
        since = self.steps if last is None else self.steps[last.after :]
        restored = -1 if last is None else _step_of(last.event)
        return max(restored, self._saved_step, *(line.step for line in since))

    def incident_facts(
        self, restores: Sequence[Restore], *, folders: frozenset[int], say: Callable[[Record], str]
    ) -> tuple[IncidentFacts, ...]:
        """By number. `folders`: those of which evidence was kept. `say`: as for `incidents_of`."""
        backs = Counter[int]()
        for one in restores:
            if one.incident is not None:
                backs[one.incident] += one.steps_back
        return incidents_of(self.incidents.values(), self.steps, steps_back=backs, folders=folders, say=say)

    def attempts(self) -> tuple[AttemptSpan, ...]:
        return self._attempts.spans()

    @property
    def newest_attempt(self) -> int:
        """Of those that were seen at work; 0 where there is none."""
        return self._attempts.newest

    def last_end(self) -> Record | None:
        """The event with which the last attempt ended; None where it is still running, or was cut off."""
        return self._ends.get(self.newest_attempt)

    def last_word(self) -> tuple[str, str]:
        """The final status of the last attempt and its reason; ("", "") while it has none."""
        if (end := self.last_end()) is None:
            return "", ""
        return str(ENDS[str(end["event"])]), str(end.get("reason") or "")[:LONGEST_TEXT]

    def total_steps(self) -> int | None:
        """As planned; with actor.dynamic_sampling the data may be used up before."""
        planned, end = self.planned_steps, self.last_end()
        last = None if end is None or end["event"] != FINISHED else as_integer(end.get("global_step"))
        return planned if planned is None or last is None else min(planned, last + 1)

    def utc_offsets(self) -> Offsets:
        """The zone of the run, as its attempts wrote it down: each until the next begins."""
        found: list[tuple[float, int]] = []
        for launch in self.launches:
            began, given = as_unix_time(launch.get("time")), launch.get("utc_offsets")
            if began and isinstance(given, list):
                pairs = [(as_float(one[0]), as_integer(one[1])) for one in given if isinstance(one, list) and one[1:]]
                known = [(at, by) for at, by in pairs if not math.isnan(at) and by is not None and abs(by) < DAY_S]
                found = [one for one in found if one[0] < began] + [(max(began, at), by) for at, by in known]
        return tuple(found)

    def evals(self) -> tuple[EvalReport, ...]:
        """By policy version."""
        return tuple(self._evals[version] for version in sorted(self._evals))

    def _placed(self) -> list[PlacedEvent]:
        return place_events(self._undoing, self.steps, attrgetter("head"))

    def _borne_out(self) -> list[PlacedEvent]:
        """Without restores that were mistakes, which may be said twice. One whose trainer ended before its first step
        was made again."""
        found: list[PlacedEvent] = []
        is_said = True
        for one in self._placed():
            if one.event.get("event") != OUTSIDE_WEIGHTS:
                found.append(one)
                is_said = False
            elif not is_said:
                mistake, is_said = found[-1], True
                while found and _is_same_restore(found[-1], mistake):
                    found.pop()
        return found

    def _gone_back(self, placed: Iterable[PlacedEvent]) -> Iterator[tuple[PlacedEvent, int]]:
        """Each that some step came before, and how many steps it undid."""
        at, head = 0, -1
        for one in placed:
            if not one.after:
                continue
            if one.event.get("event") == OUTSIDE_WEIGHTS:
                head = self.steps[one.after - 1].step
            else:
                step = _step_of(one.event)
                head = self.steps[one.after - 1].step if one.after > at else head
                yield one, max(head - step, 0)
                head = min(head, step)
            at = one.after

    def _take_attempt(self, event: Record) -> None:
        number = as_attempt(event.get("attempt"))
        if number is not None and number >= self.last_attempt.number:
            if number > self.last_attempt.number:
                self.last_attempt = LastAttempt(number=number)
            self.last_attempt.take_event(event)

    def _take_server(self, name: str, event: Record) -> None:
        time = as_unix_time(event.get("time"))
        if self._attempt_of_run(event) < self._run_attempt:
            return
        if name == STARTED or name in ENDS:
            for changes in self.server_changes.values():
                changes.append((time, "", ""))
        elif name in SERVER_STATES or name == "server.left":
            subject = str(event.get("subject"))[:LONGEST_TEXT]
            reason = str(event.get("reason") or "")[:LONGEST_TEXT] if name in SERVER_STATES else ""
            self.server_changes.setdefault(subject, []).append((time, SERVER_STATES.get(name, ""), reason))

    def _take_incident(self, name: str, event: Record) -> None:
        place = self._places.place_of(event)
        number = as_integer(event.get("incident"))
        if number is None:
            return
        incident = self.incidents.setdefault(number, RecordedIncident(number=number))
        if name == "incident.began" and incident.began is None:
            incident.began = event
            incident.place = place
        elif name == "incident.ended":
            incident.ended = event
        elif name == "incident.joined":
            incident.batches_rejected += 1
        elif name == "server.died" and incident.death_s is None:
            incident.death_s = max(as_float(event.get("detected_after_s"), 0.0), 0.0)

    def _attempt_of_run(self, event: Record) -> int:
        """A driver that ends before it has begun an attempt of its own (0) ends the last one."""
        return as_attempt(event.get("attempt")) or self._run_attempt

    def _take_end(self, name: str, line: Record) -> None:
        if name == STARTED:
            self.launches.append(line)
        if name == TAKEN:
            self.was_taken_back = True
        elif name == STARTED or name in ENDS:
            self.was_taken_back = False
            attempt = self._attempt_of_run(line)
            self._ends.pop(attempt, None)
            if name in ENDS:
                self._ends[attempt] = line

    def _take_undoing(self, event: Record) -> None:
        step = as_integer(event.get("global_step"))
        if step is None:
            return
        self._undoing.append(event)
        self._saved_step = -1
        self.rebased_step = self.rebased_step if self.rebased_step <= step else 0
        for one in self.incidents.values():
            if one.began is not None:
                one.restored_to = step if one.restored_to is None else min(one.restored_to, step)

    def _take_checkpoint(self, name: str, event: Record) -> None:
        """Of a step that was saved twice, an event about it is counted for the last one before the event."""
        step = as_integer(event.get("global_step"))
        if name == "checkpoint.committed" and step is not None:
            seconds = as_float(event.get("seconds"))
            self._saved_step = max(self._saved_step, step)
            self.checkpoints.append(CheckpointSummary(step=step, time=as_unix_time(event.get("time")), seconds=seconds))
        elif name in FATES:
            for gone in _steps_named(event):
                self._mark_checkpoint(gone, FATES[name])

    def _mark_checkpoint(self, step: int, fate: str) -> None:
        for index in range(len(self.checkpoints) - 1, -1, -1):
            one = self.checkpoints[index]
            if one.step == step and not one.fate:
                self.checkpoints[index] = replace(one, fate=fate)
                return

    def _take_state(self, name: str, event: Record) -> None:
        """When the run entered which state, and why. An attempt begins in INITIALIZING, and ends with its status, which
        one that another has followed may write late."""
        if not name.startswith("run.") or self._attempt_of_run(event) < self._run_attempt:
            return
        self._run_attempt = self._attempt_of_run(event)
        state, reason = str(event.get("state") or ""), str(event.get("reason") or "")
        if name == STARTED:
            state = "INITIALIZING"
        elif name in ENDS:
            state = str(ENDS[name])
        if state:
            self.states.append((as_unix_time(event.get("time")), state, reason))

    def _take_eval(self, event: Record) -> None:
        version, prompts = as_integer(event.get("policy_version")), as_integer(event.get("prompts"))
        sampled, greedy = as_float(event.get("sampled")), as_float(event.get("greedy"))
        if version is None or prompts is None or not (math.isfinite(sampled) and math.isfinite(greedy)):
            return
        given = event.get("by_dataset")
        pairs = given.items() if isinstance(given, Mapping) else ()
        by_dataset = {name: [*map(as_float, pair)] for name, pair in pairs if isinstance(pair, list) and len(pair) == 2}
        self._evals[version] = EvalReport(
            policy_version=version,
            prompts=prompts,
            sampled=sampled,
            greedy=greedy,
            by_dataset=by_dataset,
            unscored=as_integer(event.get("unscored")) or 0,
        )


class RunLogFiles:
    """A RunLog of a run's files, which `refresh` brings up to date."""

    def __init__(self, paths: RunPaths, *, with_steps: bool = True) -> None:
        """`with_steps` False: of the journal alone, which is short."""
        self.log = RunLog()
        steps = [(paths.metrics, self.log.take_step)] if with_steps else []
        # The steps first: whatever happened before a step that was read is then read too.
        self._follower = FileFollower((*steps, (paths.events, self.log.take_event)))

    def refresh(self, *, has_ended: bool = False) -> RunLog:
        """`has_ended`: nobody writes any more."""
        self._follower.refresh(has_ended=has_ended)
        return self.log

    def not_read(self) -> tuple[str, ...]:
        """Of each file how many lines were left out, where there are any, and why the first was."""
        return self._follower.not_read(with_why=True)


def read_run_log(paths: RunPaths, *, with_steps: bool = True) -> RunLog:
    """All that a run has written so far. `with_steps`: as for RunLogFiles. Raises JournalError naming a file that can't
    be read."""
    log = RunLogFiles(paths, with_steps=with_steps).refresh(has_ended=True)
    check_readable(paths.events, *((paths.metrics,) if with_steps else ()))
    return log


def written_steps(paths: RunPaths) -> list[StepLine]:
    """All that were written, undone ones too. Raises JournalError."""
    log = RunLog()
    for line in read_lines(paths.metrics):
        log.take_step(line)
    return log.steps


def last_end(paths: RunPaths) -> Record | None:
    """As of RunLog, by the journal alone. Raises JournalError."""
    return read_run_log(paths, with_steps=False).last_end()


def _step_of(undoing: Record) -> int:
    step = undoing["global_step"]
    assert isinstance(step, int), "else it was not taken"
    return step


def _is_same_restore(one: PlacedEvent, other: PlacedEvent) -> bool:
    kinds = {one.event.get("event"), other.event.get("event")}
    return kinds <= OF_A_RESTORE and (one.after, _step_of(one.event)) == (other.after, _step_of(other.event))


def _steps_named(event: Record) -> set[int]:
    names = event.get("checkpoints")
    said = [*(names if isinstance(names, list) else ()), event.get("subject")]
    steps = {int(match[1]) for text in said if (match := GLOBAL_STEP.search(str(text)))}
    step = as_integer(event.get("global_step"))
    return steps or ({step} if step is not None and event.get("event") != "checkpoint.condemned" else set())


def _kept(key: str, value: object) -> object:
    """Texts are texts, whatever a damaged line has in their place, and no longer than anybody reads."""
    if key in TEXTS and value is not None:
        return str(value)[:LONGEST_TEXT]
    return value[:LONGEST_TEXT] if isinstance(value, str) else value
