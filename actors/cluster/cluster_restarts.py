"""Decides whether a run goes on in another attempt, and writes the incident down, and a killed driver's.

    Ray's process ended ─► budget left? ─► incident.began ─► a new process and cluster ─► cluster.restarted ─► training
                                        └► RunError: the run ends, and the same command resumes
    halted, may pass ─► has this command taken a step? budget left? ─► incident.began ─► … ─► attempt.begun_anew

What never worked under this command may never work, so only a command that has taken a step begins anew. The incident
belongs to the attempt that follows, whose Coordinator keeps its folder and ends it. That attempt gets a new process
(launcher/cli/continuation.py): Ray can't be relied on in one that has lost a cluster.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.cluster.ray_cluster import VitalProcesses, end_leftovers
from launcher.base.errors import RunError
from launcher.base.messages import Cause, KilledDriver, RunOutcome
from launcher.base.wording import counted
from launcher.config.schema import RunConfig
from launcher.policy.incident_policy import CLUSTER, DRIVER, RUN
from launcher.policy.restart_budget import LADDERS, Repair, RepairAttempt, Rung, next_repair
from launcher.run_files.journal import Journal, Record, last_of, number_of, read_lines
from launcher.run_files.run_ends import ENDS
from launcher.run_files.run_paths import RunPaths

SUPERVISORS = ("coordinator.placed", "monitor.started")
"""Events with the pid of each."""
SAME_COMMAND = "the same command resumes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What the process that begins the next attempt must know. Times are monotonic, which the host's processes share.

    `incident`: of the loss, or of the halt, at `lost_at`; `attempt`: the one that follows, `first_attempt` that of the
    command. `begun`: when clusters were begun in place of others; `halted`: when attempts were, in place of such as
    halted, `has_halted` where the last did. `furthest`: the step after the last one that was ever committed, seen at
    `progress_at`. `screen_began`: since when its lines count. `lock`: the descriptor of the run's lock, which stays
    held. `is_asked`: to end; `notified_at`: that the machine is taken away. `settings`: the file of those that the run
    began with.
    """

    incident: int
    attempt: int
    lost_at: float
    begun: tuple[float, ...]
    furthest: int
    progress_at: float | None
    first_attempt: int = 0
    halted: tuple[float, ...] = ()
    has_halted: bool = False
    screen_began: float | None = None
    lock: int | None = None
    is_asked: bool = False
    notified_at: float | None = None
    settings: str = ""


class AttemptLost(Exception):
    """Another attempt takes the place of this one, not before `not_before`. `began`: the event of the incident."""

    def __init__(self, began: Record, known: Continuation, *, not_before: float) -> None:
        super().__init__(began["reason"])
        self.began = began
        self.known = known
        self.not_before = not_before


class ClusterRestarts:
    """`known`: of the process before this one, which lost its cluster; `killed`: of the driver before this one.
    `next_attempt` counts one more; None where this process may not be replaced. `clock` is the one that all processes
    of this host share."""

    def __init__(
        self,
        config: RunConfig,
        *,
        known: Continuation | None = None,
        killed: KilledDriver | None = None,
        next_attempt: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._next_attempt = next_attempt
        self.killed = killed
        self.known = known
        self._begun = () if known is None else known.begun
        self._halted = () if known is None else known.halted
        self._furthest = 0 if known is None else known.furthest
        self._progress_at = None if known is None else known.progress_at

    def reached(self, next_step: int) -> None:
        """A step that the run had never reached before refills the budget."""
        if next_step > self._furthest:
            self._furthest, self._progress_at = next_step, self._clock()

    def begin(self, lost: str, journal: Journal, paths: RunPaths) -> AttemptLost:
        """In place of a cluster that was lost. Raises RunError where no other is to follow."""
        repair = self._next(Cause.CLUSTER_LOST, lost)
        if repair.rung is Rung.HALT:
            budget = self._budget_of(Cause.CLUSTER_LOST)
            often = f"; {counted(budget, 'new cluster')} brought no further step (restart.cluster)" if budget else ""
            raise RunError(f"{lost}{often}", SAME_COMMAND)
        doing = "a new cluster is started, and the run resumes from its newest state"
        return self._begin(Cause.CLUSTER_LOST, lost, journal, paths, doing=doing, not_before=repair.not_before)

    def begin_anew(self, halted: RunOutcome, journal: Journal, paths: RunPaths) -> AttemptLost | RunOutcome:
        """In place of an attempt that has halted; the outcome of the run where none is to follow."""
        first = journal.attempt if self.known is None else self.known.first_attempt
        last = _last_line(paths).get("attempt")
        has_stepped = isinstance(last, int) and last >= first
        if not halted.may_pass or not has_stepped or self._config.recover.mode == "off":
            return halted
        repair = self._next(Cause.RUN_HALTED, halted.reason)
        if repair.rung is Rung.HALT:
            budget = self._budget_of(Cause.RUN_HALTED)
            often = f"; {counted(budget, 'new attempt')} brought no further step (restart.attempt)" if budget else ""
            return dataclasses.replace(halted, reason=f"{halted.reason}{often}")
        wait_s = repair.not_before - self._clock()
        which = repair.reason.rpartition(", ")[2]
        doing = f"a new attempt ({which}) begins in {wait_s:.0f} s, and resumes from the run's newest state"
        return self._begin(Cause.RUN_HALTED, halted.reason, journal, paths, doing=doing, not_before=repair.not_before)

    def _begin(
        self, cause: Cause, reason: str, journal: Journal, paths: RunPaths, *, doing: str, not_before: float
    ) -> AttemptLost:
        """The incident, as the first event of the attempt that follows."""
        at, has_halted = self._clock(), cause is Cause.RUN_HALTED
        assert self._next_attempt is not None  # else the budget is 0
        first = journal.attempt if self.known is None else self.known.first_attempt
        journal.attempt = self._next_attempt()
        subject = RUN if has_halted else CLUSTER
        number, began = _begin_incident(journal, paths, subject, cause, reason, doing=doing, at=at)
        known_next = Continuation(
            incident=number,
            attempt=journal.attempt,
            lost_at=at,
            begun=self._begun if has_halted else (*self._begun, at),
            furthest=self._furthest,
            progress_at=self._progress_at,
            first_attempt=first,
            halted=(*self._halted, at) if has_halted else self._halted,
            has_halted=has_halted,
        )
        return AttemptLost(began, known_next, not_before=not_before)

    def end_what_was_left(self) -> None:
        """Of a driver that was killed, whose cluster nobody has ended."""
        if self.killed is not None:
            end_leftovers(self.killed.mark)

    def record_restart(self, journal: Journal, paths: RunPaths) -> None:
        """Of a cluster or an attempt in place of another, and of a driver in place of one that was killed, whose
        incident begins here: with the last step that was committed, which the restored one is compared with."""
        more: dict[str, object]
        if self.known is not None:
            name, subject, reason = "cluster.restarted", CLUSTER, "a new local cluster runs"
            if self.known.has_halted:
                name, subject, reason = "attempt.begun_anew", RUN, "a new attempt runs"
            number, since, more = self.known.incident, self.known.lost_at, {}
        elif (killed := self.killed) is not None:
            often = "once" if killed.times == 1 else f"{killed.times} times"
            how = f"it was ended by {killed.how}; {often} in this command"
            doing = "a new driver has taken its place, and the run resumes from its newest state"
            number, _ = _begin_incident(journal, paths, DRIVER, Cause.DRIVER_LOST, how, doing=doing, at=killed.at)
            name, subject, reason = "driver.restarted", DRIVER, "a new driver runs"
            since, more = killed.at, {"times": killed.times}
        else:
            return
        seconds = self._clock() - since
        step = last_committed(paths)
        journal.record(name, subject=subject, reason=reason, incident=number, global_step=step, seconds=seconds, **more)

    def _budget_of(self, cause: Cause) -> int:
        budget = self._config.restart.attempt if cause is Cause.RUN_HALTED else self._config.restart.cluster
        return 0 if self._next_attempt is None else budget

    def _next(self, cause: Cause, lost: str) -> Repair:
        budget, rung = self._budget_of(cause), LADDERS[cause][0]
        if budget and self._config.recover.mode == "off":
            raise RunError(lost, "recover.mode=off resumes nothing; give the new run another trial_name")
        earlier = self._halted if cause is Cause.RUN_HALTED else self._begun
        return next_repair(
            cause,
            RUN,
            [RepairAttempt(at=at, cause=cause, subject=RUN, rung=rung) for at in earlier],
            dataclasses.replace(self._config.restart, **{rung.value: budget}),
            now=self._clock(),
            progress_at=self._progress_at,
        )


def _begin_incident(
    journal: Journal, paths: RunPaths, subject: str, cause: Cause, reason: str, *, doing: str, at: float
) -> tuple[int, Record]:
    known = (event.get("incident") for event in read_lines(paths.events))
    number = 1 + max((one for one in known if isinstance(one, int)), default=0)
    facts: dict[str, Any] = {"incident": number, "cause": cause, "onset_step": None, "doing": doing, "at": at}
    return number, journal.record("incident.began", subject=subject, reason=reason, **facts)


def end_incidents(journal: Journal, paths: RunPaths, known: Continuation | None, reason: str) -> None:
    """Those of an attempt in whose place no other can begin: its own, and whatever it has left open."""
    left: dict[int, Record] = {}
    for event in read_lines(paths.events):
        number = event.get("incident")
        if event.get("event") in ENDS:
            left.clear()
        elif event.get("event") == "incident.began" and isinstance(number, int):
            left[number] = event
        elif event.get("event") == "incident.ended" and isinstance(number, int):
            left.pop(number, None)
    if known is not None:
        left.setdefault(known.incident, {"at": known.lost_at})
    now = time.monotonic()
    for number, began in left.items():
        facts: dict[str, Any] = {
            "cause": began.get("cause"),
            "seconds": max(0.0, now - number_of(began.get("at"), now)),
            "is_mended": False,
        }
        subject = str(began.get("subject") or RUN)
        journal.record("incident.ended", subject=subject, reason=reason, incident=number, **facts)


def end_supervisors(vital: VitalProcesses, paths: RunPaths, attempt: int) -> None:
    """What ends with a cluster is not for them to judge, nor to repair."""
    pids = [last_of(paths.events, name, attempt).get("pid") for name in SUPERVISORS]
    vital.end({pid for pid in pids if isinstance(pid, int)})


def last_committed(paths: RunPaths) -> int | None:
    """The step of the ledger's last line."""
    step = _last_line(paths).get("global_step")
    return step if isinstance(step, int) else None


def _last_line(paths: RunPaths) -> Record:
    """Of the ledger; an empty one where there is none."""
    return next(iter(deque(read_lines(paths.ledger), maxlen=1)), {})
