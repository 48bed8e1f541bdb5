"""What follows the end of a run's driver: another driver, which resumes the run, or the end of the run.

    exit code 0 2 3 75 130          the run has ended, or was refused
    AGAIN, with again.json          its cluster was lost, or it halted for what may pass  ─► budget left? ─► another
    ended by a signal, unasked      it was killed                                         ─► budget left? ─► another

The budgets and the waits are those of `restart_budget`, each cause by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.base.exit_codes import AGAIN, EXIT_CODES, RESUMES
from launcher.base.messages import Cause, TerminalStatus
from launcher.base.wording import counted, signal_name
from launcher.config.supervision import RestartConfig
from launcher.policy.restart_budget import LADDERS, RepairAttempt, Rung, budget_of, next_repair

RUN = "run"
NOTICE = signal.SIGUSR1
ENDS_WHO_GETS_IT = (signal.SIGINT, signal.SIGTERM, NOTICE, signal.SIGHUP)
"""A driver that does not listen yet is ended by them: it was asked to end, not killed."""
WHAT_IS_BEGUN = {
    Cause.CLUSTER_LOST: "new cluster",
    Cause.DRIVER_LOST: "new driver",
    Cause.RUN_HALTED: "new attempt",
}
RESUMES_STATE = "the run resumes from its newest state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Why a driver asks for another one (again.json). `began`: when it was seen, monotonic. `logs`: files that show
    what happened, by the names that their ends get in the incident's folder."""

    cause: Cause
    reason: str
    began: float
    logs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """What the decision needs of the run's settings. `resumes`: recover.mode is not off. `least_wait_s`: before a
    driver in place of a killed one."""

    restart: RestartConfig
    resumes: bool = True
    least_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginAgain:
    """Begin another driver, which waits until `not_before` and records the incident. `times`: as often as this cause
    was met in this command; `doing`: for the incident; the rest as in `Again`."""

    cause: Cause
    reason: str
    doing: str
    began: float
    not_before: float
    times: int
    logs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """`reason`: "" where the driver has recorded its end itself."""

    code: int
    reason: str = ""


def after_end(
    returned: int,
    again: Again | None,
    history: Sequence[RepairAttempt],
    run: KeptRun,
    *,
    now: float,
    progress_at: float | None,
    asked: signal.Signals | None,
) -> BeginAgain | EndRun:
    """`returned`: the driver's exit code, or minus the number of the signal that ended it; `again`: what it left.

    `history`: the drivers that were begun in place of others (`begun`). `progress_at`: when a step was first seen that
    the run had never reached before; `asked`: the signal that was passed on to the driver.
    """
    if 0 <= returned != AGAIN:
        return EndRun(code=returned)
    if returned < 0:
        number = -returned
        why = f"the driver was ended by {signal_name(number)}"
        if asked is not None or number in ENDS_WHO_GETS_IT:
            return end_for(asked or signal.Signals(number), why)
        again = Again(cause=Cause.DRIVER_LOST, reason=why, began=now)
    if again is None:
        why = "its driver asked for another attempt, and again.json does not say why"
        return EndRun(code=EXIT_CODES[TerminalStatus.ERRORED], reason=why)
    if asked is not None:
        return end_for(asked, "before another attempt was begun")
    return _within_budget(again, [one for one in history if one.cause is again.cause], run, now, progress_at)


def end_for(asked: signal.Signals, why: str) -> EndRun:
    if asked is NOTICE:
        return EndRun(code=RESUMES, reason=f"the machine is taken away (SIGUSR1); {why}")
    return EndRun(code=EXIT_CODES[TerminalStatus.ABORTED], reason=f"ended by the user; {why}")


def begun(next_: BeginAgain, now: float) -> RepairAttempt:
    """For the history of the next decision."""
    return RepairAttempt(at=now, cause=next_.cause, subject=RUN, rung=LADDERS[next_.cause][0])


def _within_budget(
    again: Again, earlier: Sequence[RepairAttempt], run: KeptRun, now: float, progress_at: float | None
) -> BeginAgain | EndRun:
    rung = LADDERS[again.cause][0]
    budget = budget_of(rung, run.restart) if run.resumes else 0
    settings = replace(run.restart, **{rung.value: budget})
    repair = next_repair(again.cause, RUN, earlier, settings, now=now, progress_at=progress_at)
    if repair.rung is Rung.HALT:
        spent = f"; {counted(budget, WHAT_IS_BEGUN[again.cause])} brought no further step (restart.{rung})"
        off = "" if run.resumes else "; recover.mode=off resumes nothing"
        return EndRun(code=EXIT_CODES[TerminalStatus.ERRORED], reason=f"{again.reason}{spent if budget else off}")
    times, not_before, reason = len(earlier) + 1, repair.not_before, again.reason
    match again.cause:
        case Cause.CLUSTER_LOST:
            doing = f"a new cluster is started, and {RESUMES_STATE}"
        case Cause.RUN_HALTED:
            which = repair.reason.rpartition(", ")[2]
            begins = f"a new attempt ({which}) begins in {not_before - now:.0f} s"
            doing = f"{begins}, and resumes from the run's newest state"
        case _:
            not_before = max(not_before, now + run.least_wait_s)
            doing = f"a new driver has taken its place, and {RESUMES_STATE}"
            often = "once" if times == 1 else f"{times} times"
            reason = f"{again.reason.replace('the driver', 'it', 1)}; {often} in this command"
    return BeginAgain(
        cause=again.cause,
        reason=reason,
        doing=doing,
        began=again.began,
        not_before=not_before,
        times=times,
        logs=again.logs,
    )
