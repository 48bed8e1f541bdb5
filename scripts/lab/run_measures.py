"""Figures of one run under faults, from what it and the injector wrote. Pure.

ettr      usual step × committed steps that stand / seconds from the first commit to the last
semantic  the same, without the steps that were trained on bad data and stand
lost      usual steps in that time, less those that stand: in all, divided by the faults (L); and, where no step was
          undone, of each kind from a fault to the next
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from launcher.config.supervision import GateConfig
from launcher.reporting.ledger_audit import Audit
from launcher.run_files.journal import Record
from launcher.run_log.step_line import StepLine
from scripts.faults.outcome import FaultOutcome, while_it_runs

ALARMS = frozenset({"incident.began", "batch.rejected", "health.dead"})
HANGS = frozenset({"C2", "T2"})
LOST = "lost_steps "
"""Before a kind of fault: the usual steps that each of them cost."""
OTHER_WEIGHTS = GateConfig().distance_float32 or 1e-5
"""Mean distance of log-probs beyond which a float32 batch came from other weights."""


def run_measures(
    *,
    standing: Sequence[StepLine],
    undone: Sequence[StepLine],
    kept_tokens: float,
    events: Sequence[Record],
    faults: Sequence[FaultOutcome],
    asked: int,
    audit: Audit,
    exit_code: int | None,
    usual_s: float | None = None,
) -> dict[str, list[float]]:
    """`usual_s`: a step's seconds in a run without faults, where there was one."""
    old, zero = stale_steps(standing), zero_steps(standing)
    found = {
        "finished": [float(exit_code == 0)],
        "faults": [float(len(faults))],
        "faults_missed": [float(asked - len(faults))],
        "steps": [float(len(standing))],
        "steps_undone": [float(len(undone))],
        "alarms": [float(sum(event.get("event") in ALARMS for event in while_it_runs(events)))],
        "run_steps": [] if audit.total_steps is None else [float(audit.total_steps)],
        "prompt_uses": [float(times) for times, prompts in audit.times for _ in range(prompts)],
        "ledger_violations": [float(len(audit.problems))] if audit.problems or not audit.not_known else [],
        "stale_steps": [float(len(old))],
        "zero_reward_steps": [float(len(zero))],
        "kept_tokens": [kept_tokens],
        "detected_s": [one.noticed_s for one in faults if one.noticed_s is not None],
        "hang_detected_s": [one.noticed_s for one in faults if one.noticed_s is not None and one.kind in HANGS],
        "hangs_unnoticed": [float(one.noticed_s is None) for one in faults if one.kind in HANGS],
        "next_step_s": [one.next_step_s for one in faults if one.next_step_s is not None],
    }
    return found | time_shares(standing, undone, bad=len(old | zero), faults=faults, usual_s=usual_s)


def time_shares(
    standing: Sequence[StepLine],
    undone: Sequence[StepLine],
    *,
    bad: int,
    faults: Sequence[FaultOutcome],
    usual_s: float | None,
) -> dict[str, list[float]]:
    """Empty where fewer than two steps were committed. The usual step is the median of those that no fault hit: load
    by others that drifts from cell to cell changes no share."""
    times = sorted(line.time for line in (*standing, *undone))
    hit = {-1 if one.step is None else one.step + 1 for one in faults}
    lasted = [line.step_s for line in standing if line.step not in hit and math.isfinite(line.step_s)]
    if len(times) < 2 or not lasted or times[-1] <= times[0]:
        return {}
    usual, wall, kept = median(lasted), times[-1] - times[0], len(standing) - 1
    shares = {
        "ettr": [min(usual * kept / wall, 1.0)],
        "semantic_ettr": [min(usual * max(kept - bad, 0) / wall, 1.0)],
        "wall_s": [wall],
        "usual_step_s": [usual],
    }
    shares |= {"pace": [usual_s * kept / wall]} if usual_s else {}
    if faults:
        shares |= {"lost_steps": [max(wall / usual - kept, 0.0) / len(faults)]}
    return shares | ({} if undone else lost_by_kind(standing, usual, faults))


def lost_by_kind(
    standing: Sequence[StepLine], usual_s: float, faults: Sequence[FaultOutcome]
) -> dict[str, list[float]]:
    """From the last step before each fault to the last before the next one: usual steps in that time, less those that
    were taken. Less than 0 where they were faster than the usual one."""
    done_at = {line.step: line.time for line in standing}
    befores = [max(one.step or 0, min(done_at)) for one in faults]
    found: dict[str, list[float]] = defaultdict(list)
    for one, (before, until) in zip(faults, pairwise([*befores, max(done_at)]), strict=True):
        found[LOST + one.kind].append((done_at[until] - done_at[before]) / usual_s - (until - before))
    return dict(found)


def stale_steps(standing: Sequence[StepLine]) -> set[int]:
    """Trained on tokens of other weights than the trainer's, whatever their label says."""
    return {line.step for line in standing if line.distance > OTHER_WEIGHTS}


def zero_steps(standing: Sequence[StepLine]) -> set[int]:
    """Trained although every reward was 0, which no policy of these runs earns by itself."""
    return {line.step for line in standing if line.reward == 0.0}
