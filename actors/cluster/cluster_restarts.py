"""Decides whether a local cluster that was lost is begun again, and writes its incident down, and a killed driver's.

    Ray's process ended ─► budget left? ─► incident.began ─► a new process and cluster ─► cluster.restarted ─► training
                                        └► RunError: the run ends, and the same command resumes

The incident belongs to the attempt that follows: the Coordinator of the new cluster keeps its folder and ends it. The
new cluster gets a new process (launcher/cli/continuation.py): Ray can't be relied on in one that has lost a cluster.
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
from launcher.base.messages import Cause, KilledDriver
from launcher.config.schema import RunConfig
from launcher.policy.incident_policy import CLUSTER, DRIVER
from launcher.policy.restart_budget import RepairAttempt, Rung, next_repair
from launcher.run_files.journal import Journal, Record, last_of, read_lines
from launcher.run_files.run_paths import RunPaths

SUPERVISORS = ("coordinator.placed", "monitor.started")
"""Events with the pid of each."""
SAME_COMMAND = "the same command resumes"
POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What the process that begins the next cluster must know. Times are monotonic, which the host's processes share.

    `incident`: of the loss, at `lost_at`; `attempt`: the one that follows. `begun`: when clusters were begun in place
    of others. `furthest`: the step after the last one that was ever committed, seen at `progress_at`. `screen_began`:
    since when its lines count. `lock`: the descriptor of the run's lock, which stays held. `is_asked`: to end;
    `notified_at`: that the machine is taken away.
    """

    incident: int
    attempt: int
    lost_at: float
    begun: tuple[float, ...]
    furthest: int
    progress_at: float | None
    screen_began: float | None = None
    lock: int | None = None
    is_asked: bool = False
    notified_at: float | None = None


class ClusterLost(Exception):
    """A new cluster takes the place of the one that was lost, not before `not_before`. `began`: its event."""

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
        self._budget = 0 if next_attempt is None else config.restart.cluster
        self.known = known
        self._begun = () if known is None else known.begun
        self._furthest = 0 if known is None else known.furthest
        self._progress_at = None if known is None else known.progress_at

    def reached(self, next_step: int) -> None:
        """A step that the run had never reached before refills the budget."""
        if next_step > self._furthest:
            self._furthest, self._progress_at = next_step, self._clock()

    def begin(self, lost: str, journal: Journal, paths: RunPaths) -> ClusterLost:
        """The incident, as the first event of the attempt that follows. Raises RunError where none is to follow."""
        not_before, lost_at = self._allow(lost), self._clock()
        assert self._next_attempt is not None  # else the budget is 0
        journal.attempt = self._next_attempt()
        doing = "a new cluster is started, and the run resumes from its newest state"
        number, began = _begin_incident(journal, paths, CLUSTER, Cause.CLUSTER_LOST, lost, doing=doing, at=lost_at)
        known_next = Continuation(
            incident=number,
            attempt=journal.attempt,
            lost_at=lost_at,
            begun=(*self._begun, lost_at),
            furthest=self._furthest,
            progress_at=self._progress_at,
        )
        return ClusterLost(began, known_next, not_before=not_before)

    def end_what_was_left(self) -> None:
        """Of a driver that was killed, whose cluster nobody has ended."""
        if self.killed is not None:
            end_leftovers(self.killed.mark)

    def record_restart(self, journal: Journal, paths: RunPaths) -> None:
        """Of a cluster in place of another, and of a driver in place of one that was killed, whose incident begins
        here: with the last step that was committed, which the restored one is compared with."""
        more: dict[str, object]
        if self.known is not None:
            name, subject, reason = "cluster.restarted", CLUSTER, "a new local cluster runs"
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

    def _allow(self, lost: str) -> float:
        """When the next cluster may be started."""
        if self._budget and self._config.recover.mode == "off":
            raise RunError(lost, "recover.mode=off resumes nothing; give the new run another trial_name")
        repair = next_repair(
            Cause.CLUSTER_LOST,
            CLUSTER,
            [RepairAttempt(at=at, cause=Cause.CLUSTER_LOST, subject=CLUSTER, rung=Rung.CLUSTER) for at in self._begun],
            dataclasses.replace(self._config.restart, cluster=self._budget),
            now=self._clock(),
            progress_at=self._progress_at,
        )
        if repair.rung is Rung.HALT:
            clusters = f"{self._budget} new cluster{'s' if self._budget > 1 else ''}"
            often = f"; {clusters} brought no further step (restart.cluster)" if self._budget else ""
            raise RunError(f"{lost}{often}", SAME_COMMAND)
        return repair.not_before


def _begin_incident(
    journal: Journal, paths: RunPaths, subject: str, cause: Cause, reason: str, *, doing: str, at: float
) -> tuple[int, Record]:
    known = (event.get("incident") for event in read_lines(paths.events))
    number = 1 + max((one for one in known if isinstance(one, int)), default=0)
    facts: dict[str, Any] = {"incident": number, "cause": cause, "onset_step": None, "doing": doing, "at": at}
    return number, journal.record("incident.began", subject=subject, reason=reason, **facts)


def end_supervisors(vital: VitalProcesses, paths: RunPaths, attempt: int) -> None:
    """What ends with a cluster is not for them to judge, nor to repair."""
    pids = [last_of(paths.events, name, attempt).get("pid") for name in SUPERVISORS]
    vital.end({pid for pid in pids if isinstance(pid, int)})


def last_committed(paths: RunPaths) -> int | None:
    """The step of the ledger's last line."""
    for line in deque(read_lines(paths.ledger), maxlen=1):
        step = line.get("global_step")
        return step if isinstance(step, int) else None
    return None
