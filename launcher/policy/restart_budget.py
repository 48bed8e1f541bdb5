"""May a repair be tried again, which one, and when? Rungs: retry → server → halt; of the trainer:
retry → restore → halt.

A halt after failures that may pass by themselves (processes that are killed or hang) is not the end: the driver begins
another attempt of the run, in which everything starts anew, after waits of their own, within the budget of the rung
`attempt`. One that a process itself explains in the same words each time is.

Each cause has its ladder and each rung a budget. Attempts count per cause and subject since the subject last took
part in getting further than ever before: a budget per lifetime would end a long run for its length, one that any
step refills would let a run fall back and repeat the same steps for ever, and one that others refill would restart
a server on a broken GPU for ever. Failures a quiet window apart don't belong together. Waiting times double up to a
cap; the first try waits for nothing.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from launcher.base.messages import Cause
from launcher.base.wording import counted
from launcher.config.supervision import RestartConfig


class Rung(enum.StrEnum):
    """How large a repair is; each is tried before the next."""

    RETRY = "retry"
    SERVER = "server"
    RESTORE = "restore"
    CLUSTER = "cluster"
    DRIVER = "driver"
    ATTEMPT = "attempt"
    HALT = "halt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairAttempt:
    """One repair that was begun. `onset_step` and `restored_step` where it was a restore of the trainer. `told`: the
    failure in the words of the process that failed, "" where it said nothing."""

    at: float
    cause: Cause
    subject: str
    rung: Rung
    onset_step: int | None = None
    restored_step: int | None = None
    told: str = ""


OF_A_SERVER = (Rung.SERVER, Rung.HALT)
OF_WEIGHTS = (Rung.RETRY, *OF_A_SERVER)
OF_THE_TRAINER = (Rung.RESTORE, Rung.HALT)
OF_EITHER = (Rung.SERVER, Rung.RESTORE, Rung.HALT)
"""A server's part of it is its restarts, the trainer's its restores (`without`)."""

LADDERS: Mapping[Cause, tuple[Rung, ...]] = {
    **dict.fromkeys((Cause.SERVER_CRASH, Cause.SERVER_HANG, Cause.SERVER_OOM, Cause.SERVER_SLOW), OF_A_SERVER),
    **dict.fromkeys((Cause.GPU_FAULT, Cause.NODE_LOST, Cause.DISK_FULL), OF_EITHER),
    **dict.fromkeys((Cause.SERVER_STALE, Cause.SERVER_CORRUPT), OF_WEIGHTS),
    **dict.fromkeys((Cause.TRAINER_CRASH, Cause.TRAINER_HANG, Cause.TRAINER_OOM), OF_THE_TRAINER),
    Cause.REWARD_COLLAPSE: OF_THE_TRAINER,
    Cause.NONFINITE: (Rung.RETRY, *OF_THE_TRAINER),
    Cause.CHECKPOINT_CORRUPT: (Rung.RETRY, *OF_THE_TRAINER),
    Cause.VERIFIER_BROKEN: OF_THE_TRAINER,
    Cause.OUTSIDE_WEIGHTS: (Rung.RETRY, Rung.HALT),
    Cause.CLUSTER_LOST: (Rung.CLUSTER, Rung.HALT),
    Cause.DRIVER_LOST: (Rung.DRIVER, Rung.HALT),
    Cause.RUN_HALTED: (Rung.ATTEMPT, Rung.HALT),
}
"""From the smallest repair that can help to the end of the run."""

MAY_PASS = frozenset(
    {Cause.SERVER_CRASH, Cause.SERVER_HANG, Cause.SERVER_STALE, Cause.SERVER_CORRUPT, Cause.NODE_LOST}
    | {Cause.TRAINER_CRASH, Cause.TRAINER_HANG, Cause.CHECKPOINT_CORRUPT}
)
"""What the same command may go on from: not memory, a GPU, numbers that are not finite or rewards, which it would meet
again. Weights that no restart of a server brings right are loaded from a checkpoint then."""
VARIES = re.compile(r"0x[0-9a-f]+|\d+")
"""In the words of a failure, from one time to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Do `rung`, not before `not_before` (on the clock of the history). `tried`: what was, where nothing is left;
    `may_pass`: as of `Halt`, there."""

    rung: Rung
    not_before: float
    reason: str
    tried: str = ""
    may_pass: bool = False


def next_repair(
    cause: Cause,
    subject: str,
    history: Sequence[RepairAttempt],
    settings: RestartConfig,
    *,
    now: float,
    progress_at: float | None,
    without: frozenset[Rung] = frozenset(),
    told: str = "",
) -> Repair:
    """The next rung for a failure of `subject`.

    `history`: oldest first. `progress_at`: when the run last completed a step that it had never completed before,
    with the help of `subject`.
    `without`: rungs that can't help `subject`. `told`: as of an attempt, of this failure.
    """
    recent = _since_quiet(history, settings, now, progress_at)
    rungs = [rung for rung in LADDERS[cause] if rung is not Rung.HALT and rung not in without]
    spent = {rung: _spent(rung, cause, subject, recent) for rung in rungs}
    for rung in rungs:
        budget = budget_of(rung, settings)
        if spent[rung] < budget:
            return Repair(
                rung=rung,
                not_before=_not_before(rung, cause, subject, recent, settings, now),
                reason=f"{cause} of {subject}: {rung}, {spent[rung] + 1} of {budget}",
            )
    tried = ", ".join(f"{rung} {counted(count, 'time')}" for rung, count in spent.items()) or "nothing can help here"
    reason = f"{cause} of {subject} again, without progress: {tried}"
    may_pass = cause in MAY_PASS and not _always_tells(told, cause, subject, recent)
    return Repair(rung=Rung.HALT, not_before=now, reason=reason, tried=tried, may_pass=may_pass)


def budget_of(rung: Rung, settings: RestartConfig) -> int:
    """How often a rung is tried before the next."""
    match rung:
        case Rung.RETRY:
            return settings.retry
        case Rung.SERVER:
            return settings.server
        case Rung.RESTORE:
            return settings.restore
        case Rung.CLUSTER:
            return settings.cluster
        case Rung.DRIVER:
            return settings.driver
        case Rung.ATTEMPT:
            return settings.attempt
        case Rung.HALT:
            return 0
        case _:
            assert_never(rung)


def _since_quiet(
    history: Sequence[RepairAttempt], settings: RestartConfig, now: float, progress_at: float | None
) -> list[RepairAttempt]:
    """The attempts that belong to the present trouble: since the last progress, no quiet window between any two."""
    recent: list[RepairAttempt] = []
    later_at = now
    for attempt in reversed(history):
        if later_at - attempt.at > settings.window_s or (progress_at is not None and attempt.at < progress_at):
            break
        recent.insert(0, attempt)
        later_at = attempt.at
    return recent


def _spent(rung: Rung, cause: Cause, subject: str, recent: Sequence[RepairAttempt]) -> int:
    """Attempts at a rung. Retries count from 0 after each larger repair, of whatever cause: it made a new situation."""
    if rung is Rung.RETRY:
        small = itertools.takewhile(
            lambda a: a.rung is Rung.RETRY, (a for a in reversed(recent) if a.subject == subject)
        )
        return sum(attempt.cause is cause for attempt in small)
    return sum(a.rung is rung and a.cause is cause and a.subject == subject for a in recent)


def _always_tells(told: str, cause: Cause, subject: str, recent: Sequence[RepairAttempt]) -> bool:
    """The process has explained each failure in the same words, but for numbers: the next one would end alike."""
    words = [one.told for one in recent if one.cause is cause and one.subject == subject]
    return bool(told and words) and {VARIES.sub("", one) for one in words} == {VARIES.sub("", told)}


def still_counted(
    attempts: Sequence[RepairAttempt], proved: Mapping[str, float], gone: Collection[str]
) -> list[RepairAttempt]:
    """Those that a later plan may count. `proved`: when the run last got further with the help of a subject; `gone`:
    subjects that are no longer repaired.

    No budget of a subject reaches behind its last proof, so none reaches behind the oldest attempt that still waits for
    one: from there on there are as many as the budgets allow. Restores from a collapse are kept: whether it comes again
    at the same place is asked for the whole run, and a place has two at most. The newest is kept in any case."""
    owing = (
        place
        for place, one in enumerate(attempts)
        if one.subject not in gone and one.at >= proved.get(one.subject, float("-inf"))
    )
    first = next(owing, len(attempts) - 1)
    return [one for place, one in enumerate(attempts) if place >= first or one.onset_step is not None]


def restored_nothing(attempts: Sequence[RepairAttempt], step: int | None) -> list[RepairAttempt]:
    """The last restore of this step failed. It counts against its budget all the same, but whatever comes next, those
    weights were not at work: it is no collapse after a restore."""
    mine = [place for place, one in enumerate(attempts) if step is not None and one.restored_step == step]
    last = mine[-1] if mine else None
    return [replace(one, restored_step=None) if place == last else one for place, one in enumerate(attempts)]


def _not_before(
    rung: Rung, cause: Cause, subject: str, recent: Sequence[RepairAttempt], settings: RestartConfig, now: float
) -> float:
    """After the wait for the same failure; and, of anything larger than a retry, after that for whatever was done to
    this subject: one that fails in a new way after each restart would else be restarted without a pause. Another
    attempt waits from the first on: all that was tried just before has failed."""
    mine = [attempt for attempt in recent if attempt.cause is cause and attempt.subject == subject]
    if rung is Rung.ATTEMPT:
        return now + min(settings.attempt_wait_s * 2.0 ** min(len(mine), 30), settings.window_s / 2)
    larger = [one for one in recent if one.subject == subject and Rung.RETRY not in (rung, one.rung)]
    return max((tries[-1].at + wait_s(len(tries), settings) for tries in (mine, larger) if tries), default=now)


def wait_s(tries: int, settings: RestartConfig) -> float:
    """Before the next try. Doubling with each try, from none at all before the first."""
    if tries == 0:
        return 0.0
    doublings = min(tries - 1, 30)  # beyond, a float would overflow before the cap is asked
    return min(settings.wait_initial_s * 2.0**doublings, settings.wait_max_s)
