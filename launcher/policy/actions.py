"""What a plan can order: records that the Coordinator performs, tests compare and the journal prints.

Each may be begun again after it failed, and must end by a deadline of its own, since nothing orders it again before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.base.messages import Overrides, TerminalStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseTrainer:
    """The step loop stops before its next optimizer step, and answers when it has. `save`: a checkpoint is written
    first, so that what follows can be undone."""

    reason: str
    save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTrainer:
    """The step loop continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTrainer:
    """End the trainer's process, make sure that it is gone, start another; it waits, paused and with nothing loaded."""

    reason: str
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkTrainer:
    """Have the trainer's other process import and load what takes long; one that hangs is ended first."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnparkTrainer:
    """End the parked process; the empty one that Ray starts in its place stays empty."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTrainer:
    """Load the checkpoint of a step; -1: the weights that the run began with. The trainer stays paused.

    Checkpoints of later steps are set aside. One that can't be loaded is reported as incomplete from then on.
    `onset_step`: of the damage that it goes back from, where there is one. `condemn_after`: checkpoints of steps later
    than this one are marked as damaged first; they stay where a person can inspect them. `restore_count`: of a
    person's request, which says the rest (launcher/checkpoints/restore_request.py); None: the run's own.
    """

    global_step: int
    reason: str
    onset_step: int | None = None
    condemn_after: int | None = None
    restore_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartServer:
    """End a server's complete process tree, make sure that it is gone, start another. One that is new has none."""

    name: str
    reason: str
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonServer:
    """Mark it FAILED: the run continues with the others."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveServer:
    """Take a server out of traffic, let its requests finish or migrate, stop it, and forget it."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Send a server the trainer's newest weights; from then on each publish includes it.

    `version` when it was ordered; `lineage`: how many restores lie behind them.
    """

    name: str
    version: int
    lineage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitServer:
    """Ask a golden probe, and give the server traffic.

    One whose answer is wrong stays STALE with no weight version, so that its weights are loaded again.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """End the run: stop everything in reverse order. After ERRORED what is sound is saved first.

    `may_pass`: a person could only give the same command again, so the driver does (`restart.attempt`).
    `reinstate_after`: the last restore, to this step, was a mistake; what it set aside is put back first.
    """

    reason: str
    word: TerminalStatus = TerminalStatus.ERRORED
    may_pass: bool = False
    reinstate_after: int | None = None


Action = (
    PauseTrainer
    | ResumeTrainer
    | RestartTrainer
    | ParkTrainer
    | UnparkTrainer
    | RestoreTrainer
    | RestartServer
    | AbandonServer
    | LeaveServer
    | LoadWeights
    | AdmitServer
    | Halt
)
