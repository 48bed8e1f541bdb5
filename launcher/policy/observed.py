"""The input and the output of a recovery plan.

The input is what is seen now, of living processes and of the disk, and what the run's memory has. A Coordinator that
replaces a killed one knows after one look what its predecessor knew.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.base.messages import Cause, EvalReport, Health, Incident, Rejection, ServerState, TerminalStatus, Verdict
from launcher.policy.actions import Action, RestoreTrainer
from launcher.policy.checkpoint_status import CheckpointFacts
from launcher.policy.disk_health import DiskTrouble
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import MemorySettings, TriedSettings
from launcher.policy.restart_budget import RepairAttempt
from launcher.policy.restore import first_damaged
from launcher.policy.reward_health import LowerLevel

TRAINER = "trainer"
GONE = frozenset({ServerState.DEAD, ServerState.FAILED})
OF_WEIGHTS = frozenset({Cause.SERVER_STALE, Cause.SERVER_CORRUPT})


class RunState(enum.StrEnum):
    """The states of a run.

    INITIALIZING ──► RUNNING ◄──► REPAIRING ◄──► RESTORING ◄──► PAUSED   (each of the last four to each other)
         │              │              │              │            │
         └──────────────┴──────────────┴──────────────┴────────────┴──► SHUTTING_DOWN ──► FINISHED | ERRORED | ABORTED

    INITIALIZING lasts until the trainer steps for the first time, or could and is held: a pause that was asked for
    before the first step leads to PAUSED. Every run ends with a status (P9), and only through SHUTTING_DOWN, so that
    nothing is left running when it is reported. `transition` in launcher/policy/plan.py holds the legal ways.
    """

    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    REPAIRING = "REPAIRING"
    RESTORING = "RESTORING"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    FINISHED = "FINISHED"
    ERRORED = "ERRORED"
    ABORTED = "ABORTED"


ENDS = frozenset(RunState(status) for status in TerminalStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server of the fleet.

    `lineage`: how many restores lay behind the trainer's weights when it got its own. After a restore the same
    version numbers are used again for other weights, so a server that slept through one could pass for current.
    `ran_out`: where memory ran out, if that ended it. `progress_at`: when the run last completed a step that it had
    never completed before, with tokens of this server. `is_loading`: the trainer sends it weights by itself, within a
    deadline: while it is behind, nobody has to repair it. `unschedulable_since`: since when Ray has found no node for
    it, None where it has a place. `stale_reason`: why the trainer took it out of traffic, "" where it did not.
    """

    name: str
    state: ServerState
    verdict: Verdict
    weight_version: int | None = None
    lineage: int | None = None
    ran_out: RanOut | None = None
    progress_at: float | None = None
    is_loading: bool = False
    unschedulable_since: float | None = None
    stale_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """The trainer.

    `is_loaded`: its weights are those of a checkpoint, or the first ones, by order; a fresh process is not.
    `is_paused`: the loop has stopped and confirmed it. `is_publishing`: from the optimizer step until every server has
    confirmed the new version or has been given up; meanwhile versions differ by right.
    `unschedulable_since`: as of a server. `told`: what it says itself that ended it, or how it is done; "" where it was
    killed or hangs. `is_command`: it is another project's, and takes care of its servers' weights and of its waiting
    requests by itself, or by a door that is always there. `waits_itself`: its process waits between two steps, and
    looks for the end of the pause itself: no order reaches it.
    """

    verdict: Verdict
    is_loaded: bool
    is_paused: bool
    policy_version: int
    lineage: int
    next_step: int
    is_publishing: bool = False
    is_evaluating: bool = False
    is_finished: bool = False
    ran_out: RanOut | None = None
    unschedulable_since: float | None = None
    told: str = ""
    is_command: bool = False
    waits_itself: bool = False


def is_dead(server: ServerFacts) -> bool:
    return server.state in GONE or server.verdict.health is Health.DEAD


def is_doubted(server: ServerFacts) -> bool:
    """Its weights are."""
    return server.verdict.health is Health.SUSPECT and server.verdict.cause in OF_WEIGHTS


def is_current(server: ServerFacts, trainer: TrainerFacts) -> bool:
    """Does it hold the very weights that the trainer has?"""
    return (server.weight_version, server.lineage) == (trainer.policy_version, trainer.lineage)


def can_serve(seen: Observed) -> bool:
    """Does a server have the trainer's weights? A command may begin without one: its requests wait at the door, or its
    servers are its own."""
    return seen.trainer.is_command or any(
        server.state is ServerState.READY and not is_dead(server) and is_current(server, seen.trainer)
        for server in seen.servers
    )


def is_unschedulable(server: ServerFacts) -> bool:
    """It ended with its node, and Ray has found no other for it."""
    return is_dead(server) and server.unschedulable_since is not None


def holds_damage(incident: Incident | None, trainer: TrainerFacts) -> bool:
    """Are the trainer's weights from after the damage began? After a restore to before it, no longer."""
    damaged = first_damaged(incident) if incident is not None else None
    return damaged is not None and trainer.is_loaded and trainer.next_step - 1 >= damaged


class StandbyTrainer(enum.StrEnum):
    """The trainer's other process. UNKNOWN: it is being started, is busy, or has not answered for a moment."""

    NONE = "none"
    UNKNOWN = "unknown"
    EMPTY = "empty"
    PARKED = "parked"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One observation of the complete run: what the cluster shows, and from `state` on what the Coordinator remembers.

    `checkpoints`: those that this run may go back to, None where they have not been read. `incident`: found among the
    current steps (launcher/policy/reward_health.py, or the trainer's report of non-finite numbers); `is_judged`:
    whoever finds them has answered lately, else none is known and there may be one. `under_way`: actions ordered and
    not yet ended, each of which must end by a deadline of its own. `tried`: where memory ran out on this host so far.
    `evals`: held-out accuracies so far, for the run's outcome. `rejections`: batches rejected since the last step.
    `lower_level`: what the gate has let pass after some of them.
    `progress_at`: as of a server, of the run. `hold_reason`, `abort_reason`: what a person asked for, "" if nothing.
    `asked_restore`: what a person asked for, until it is done. `ending`: the status with which the run is being shut
    down. `reinstate_after`: as of that halt, until it is done.
    `is_stopped`: nothing of it is left running. `monitor_silent_s`, `door_silent_s`: for how long the HealthMonitor, or
    the door of a command, has been asked in vain; `monitor_error`, `door_error`: why the last question has no answer.
    `fleet`: the servers that there are to be, None: those that there
    are. `newcomers`: those that have not served yet; that one of them has no weights is no incident. `disk`: what
    keeps the run from writing.
    `standby_trainer`: NONE where there is none. `report_every`: of how many steps the trainer reports one.
    `not_before`: actions that failed a moment ago, by kind and name, and when each may be tried again.
    `standstill_s`: for how long it could take no step, and waited for nobody (launcher/policy/standstill.py).
    """

    servers: tuple[ServerFacts, ...]
    trainer: TrainerFacts
    checkpoints: tuple[CheckpointFacts, ...] | None
    memory: MemorySettings
    incident: Incident | None = None
    is_judged: bool = True
    progress_at: float | None = None
    is_stopped: bool = False
    evals: tuple[EvalReport, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    lower_level: LowerLevel | None = None
    monitor_silent_s: float = 0.0
    monitor_error: str = ""
    door_silent_s: float = 0.0
    door_error: str = ""
    disk: DiskTrouble | None = None
    standby_trainer: StandbyTrainer = StandbyTrainer.NONE
    report_every: int = 1
    state: RunState = RunState.INITIALIZING
    under_way: tuple[Action, ...] = ()
    tried: tuple[TriedSettings, ...] = ()
    hold_reason: str = ""
    abort_reason: str = ""
    asked_restore: RestoreTrainer | None = None
    ending: TerminalStatus | None = None
    reinstate_after: int | None = None
    fleet: tuple[str, ...] | None = None
    newcomers: frozenset[str] = frozenset()
    not_before: Mapping[tuple[type[Action], str], float] = field(default_factory=dict)
    standstill_s: float = 0.0

    def stays(self, server: str) -> bool:
        """Whether there is to be such a server."""
        return self.fleet is None or server in self.fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What to do now, in order, and the state that follows.

    `attempts` go into the history when the actions are begun. `wake_at`: when to look again at the latest, where
    something waits for its time. `needs_checkpoints`: it is to be made again with the checkpoints read; where they
    can't be read, what it holds is done without them.
    """

    actions: tuple[Action, ...]
    state: RunState
    reason: str
    attempts: tuple[RepairAttempt, ...] = ()
    wake_at: float | None = None
    needs_checkpoints: bool = False
