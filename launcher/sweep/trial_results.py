"""Reads the result of a trial from the files of its run: its status and cause, and the figures to compare."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.base.messages import Cause
from launcher.checkpoints.resume_decision import already_finished
from launcher.config.schema import RunConfig
from launcher.reporting.run_facts import read_facts
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import read_run_log
from launcher.sweep.sweep_trials import SweepTrial

OUT_OF_MEMORY = frozenset({Cause.SERVER_OOM, Cause.TRAINER_OOM})
CAUSES = re.compile("|".join(rf"\b{cause}\b" for cause in Cause))


class TrialStatus(enum.StrEnum):
    """How a trial ended. FINISHED and ERRORED are its run's own, and stay when the sweep is started again."""

    FINISHED = "FINISHED"
    ERRORED = "ERRORED"
    REFUSED = "REFUSED"
    """Its settings or this machine are wrong: nothing was started."""
    CUT_OFF = "CUT OFF"
    """It was ended, or ended without a status; the next sweep resumes it."""
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Figures are None where there is nothing to take them from. `cause`: of the end, where it is a known one."""

    trial: SweepTrial
    status: TrialStatus
    reason: str = ""
    cause: Cause | None = None
    steps: int = 0
    step_s: float | None = None
    tokens_per_s: float | None = None
    reward: float | None = None
    incidents: Mapping[str, int] = field(default_factory=dict)

    @property
    def ran_out_of_memory(self) -> bool:
        return self.cause in OUT_OF_MEMORY or any(self.incidents.get(cause) for cause in OUT_OF_MEMORY)


def settled(config: RunConfig, paths: RunPaths, *, retry: bool) -> bool:
    """Need this trial not be run again? `retry`: one that halted is, unless memory ran out: it would again."""
    if already_finished(config, paths):
        return True
    word, reason = read_run_log(paths, with_steps=False).last_word()
    return word == TrialStatus.ERRORED and not (retry and cause_in(reason) not in OUT_OF_MEMORY)


def result_of(trial: SweepTrial, paths: RunPaths, *, output: str = "") -> TrialResult:
    """The result of a trial that was run, now or earlier. `output`: its last lines, for one that has no status."""
    facts = read_facts(paths)
    has_own = facts.word in (TrialStatus.FINISHED, TrialStatus.ERRORED)
    status = TrialStatus(facts.word) if has_own else TrialStatus.CUT_OFF
    return TrialResult(
        trial=trial,
        status=status,
        reason=facts.reason if facts.word else output,
        cause=cause_in(facts.reason) if status is TrialStatus.ERRORED else None,
        steps=len(facts.steps),
        step_s=facts.losses.usual_step_s,
        tokens_per_s=facts.tokens_per_s,
        reward=facts.reward_last,
        incidents=Counter(incident.cause for incident in facts.incidents),
    )


def cause_in(reason: str) -> Cause | None:
    """The first cause that a run's reason names."""
    found = CAUSES.search(reason)
    return Cause(found[0]) if found else None
