"""The rewards of the run's valid steps, for the detectors: a restore undoes the steps after its checkpoint.

While the run steps, rewards come in one way: with each batch that the gate admits. The files are read once, when the
monitor begins, so that after a restart it knows what its predecessor knew, and no answer waits for the disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from launcher.base.messages import Cause
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.admission import (
    DISTANCE_FACTOR,
    OF_WEIGHTS,
    USUAL_MIN_STEPS,
    USUAL_STEPS,
    GateRules,
    StepFigures,
    UsualValues,
)
from launcher.policy.canary_policy import LAST_ATTEMPT_BROKE, CanaryRound, CanaryScore
from launcher.policy.reward_health import (
    LowerLevel,
    RewardPoint,
    ServerFault,
    distance_drifted,
    restore_contradicted,
    restore_evidence,
)
from launcher.run_files.journal import Record, number_of, read_lines
from launcher.run_files.run_order import in_order
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.line_values import as_integer

STEP = re.compile(r"-?\d{1,15}")
MOST_STEPS = 2000
"""Kept; more than any detector looks back."""
FIRST_STEPS = 100
"""Kept too, of a run that has had more: log-probs that drift are compared with theirs."""


class RewardSeries:
    """`steps`: oldest first. `restored_step`: where the last restore from an onset went back to; None where there was
    none. `accusation`: the event with which a predecessor accused the verifier, if nothing has cleared it since.
    `owes_proof`: no step was taken since that restore, or since a finding that the weights were not what changed.
    `attempt`: the last in which the trainer was restored; from then on the series ends where the trainer is. `lineage`:
    how many restores of it there were. `faults`: which servers had other weights, and when. `evidence`: by step, what
    the restores to it and to later ones left open.
    `base`: the first step that later ones are compared with. `changed_at`: since when batches are as they are usually,
    after some that were far from what was usual before."""

    def __init__(self) -> None:
        self.steps: list[StepFigures] = []
        self._first: list[StepFigures] = []
        self.restored_step: int | None = None
        self.accusation: Record | None = None
        self.owes_proof = False
        self.faults: dict[tuple[str, int], ServerFault] = {}
        self.evidence: dict[int, tuple[float, ...]] = {}
        self.attempt: object = None
        self.lineage = 0
        self.base = 0
        self.changed_at = 0
        self._has_fallen = False  # at that step
        self._undone: list[StepFigures] = []  # by restores since the last step
        self._undone_base = 0  # before these

    @classmethod
    def read(cls, paths: RunPaths, *, is_ahead: bool = False) -> RewardSeries:
        """From metrics.jsonl and events.jsonl, by the methods that a live run's batches and restores go through: else
        a successor would know something else than its predecessor did. `is_ahead`: older weights may have made some
        tokens of a step, whose line has the distance of all together. Raises JournalError."""
        series = cls()
        changes: list[Record] = []
        event: Record
        repair: Record = {}
        for event in read_lines(paths.events):
            match event.get("event"):
                case "trainer.restored":
                    restored, repair = {**event, "onset_step": repair.get("onset_step")}, {}
                    changes.append(restored)
                    step = as_integer(event.get("global_step"))
                    if isinstance(restored["onset_step"], int) and step is not None:
                        series._forgive(step)
                case "batch.rejected":
                    series._take_rejection(event)
                case "health.outside_weights" | "reward.rebased":
                    changes.append(event)
                case "repair.begun" if isinstance(event.get("restored_step"), int):  # of the trainer, not of a server
                    repair = event
                    series._take_repair(event)
                case "restore.evidence" if isinstance(left := event.get("evidence"), dict):
                    known = {step: errors for step, errors in left.items() if isinstance(errors, list)}
                    series.evidence = {int(n): tuple(map(number_of, known[n])) for n in known if STEP.fullmatch(n)}
                case "canary.wrong":
                    series.accusation = event
                case "canary.sound":
                    series.accusation = None
        steps = (line for line in read_lines(paths.metrics) if "event" not in line)
        for line in in_order(changes, steps):
            if "event" in line:
                series._take_change(line)
            else:
                series._take_line(line, knows_distance=not is_ahead)
        return series

    @property
    def points(self) -> list[RewardPoint]:
        """Of the steps whose rewards are known, from `base` on."""
        known = (s.point for s in self.steps if s.point.step >= self.base)
        return [point for point in known if not (math.isnan(point.low) and math.isnan(point.mean))]

    @property
    def next_step(self) -> int:
        return self.steps[-1].point.step + 1 if self.steps else 0

    @property
    def lower_level(self) -> LowerLevel | None:
        """None where the gate has let no such batch pass."""
        if self.changed_at == 0 or not self._has_fallen:
            return None
        return LowerLevel(since_step=self.changed_at, is_settled=self.next_step - self.changed_at >= USUAL_MIN_STEPS)

    def usual(self) -> UsualValues | None:
        """None as long as the run has too few steps to compare with."""
        last, known = self.steps[-USUAL_STEPS:], self.next_step - self.changed_at
        if len(last) < USUAL_MIN_STEPS:
            return None
        since = self.changed_at if known >= USUAL_MIN_STEPS else math.inf
        return UsualValues.of(last, since=since, first=(self._first or self.steps)[:USUAL_STEPS])

    def drift(self, rules: GateRules, now: Mapping[str, float]) -> str:
        """Why the usual distance is no longer that of the first steps; "" where it is. `now`: of each server."""
        usual, settings = self.usual(), rules.settings
        least, factor = settings.distance_float32 if rules.is_exact else settings.distance_bfloat16, DISTANCE_FACTOR
        if usual is None or least is None:
            return ""
        reason = distance_drifted(usual.first_distance, usual.distance, least=least, factor=factor)
        return reason and f"{reason}; now {', '.join(f'{name} by {by:.2g}' for name, by in now.items())}"

    def admitted(self, step: StepFigures, *, has_changed: bool = False) -> None:
        """A batch is trained on. Of a step that is repeated the last result counts, and nothing after it.

        `has_changed`: it is far from what was usual, as were those before it.
        """
        self.restored(step.point.step - 1)
        if has_changed:
            before = self.usual()
            self.changed_at = step.point.step
            self._has_fallen = before is not None and step.point.mean < before.mean_reward
        self.owes_proof = False
        self.steps.append(step)
        if len(self.steps) > 2 * MOST_STEPS:
            self._first = self._first or self.steps[:FIRST_STEPS]
            del self.steps[:-MOST_STEPS]

    def restored(self, global_step: int, onset_step: int | None = None) -> None:
        """The steps after `global_step` are undone. Only a restore from an onset after it puts the run on probation:
        that a process crashed is no evidence against the policy."""
        while self.steps and self.steps[-1].point.step > global_step:
            self.steps.pop()
        self._first = [step for step in self._first if step.point.step <= global_step]
        self.base = self.base if self.base <= global_step else 0
        self.changed_at = self.changed_at if self.changed_at <= global_step else 0
        if onset_step is not None:
            self._forgive(global_step)
        if onset_step is not None and onset_step > global_step:
            self._went_back(global_step)
            self.owes_proof = True

    def _went_back(self, global_step: int) -> None:
        if self.restored_step is None or global_step > self.restored_step:
            self.evidence = {}  # of another fall
        self.restored_step = global_step

    def contradicted(self, first: RewardPoint, replayed: CanaryScore | None, settings: RewardHealthConfig) -> str:
        """As `restore_contradicted` of the first batch after a restore, with what the restores to later checkpoints
        before it left open. Of one checkpoint the last batch counts alone: it says nothing new of the others."""
        here = self.next_step - 1
        earlier = [error for step, errors in self.evidence.items() if step != here for error in errors]
        reason = restore_contradicted(first, self.points, replayed, settings, earlier=earlier)
        evidence = restore_evidence(first, self.points, replayed, settings)
        self.evidence = {} if reason or not evidence else {**self.evidence, here: evidence}
        return reason

    def blame(self, name: str, cause: Cause, step: int) -> None:
        """The server had other weights, seen at this step."""
        self.faults[name, step] = ServerFault(name=name, cause=cause, since_step=step)

    def _forgive(self, global_step: int) -> None:
        """What a server did to steps that are undone explains nothing in those that repeat them."""
        self.faults = {key: one for key, one in self.faults.items() if one.since_step <= global_step}

    def _take_rejection(self, event: Record) -> None:
        step, cause, names = as_integer(event.get("global_step")), str(event.get("cause")), event.get("subjects")
        if step is not None and isinstance(names, list) and cause in OF_WEIGHTS:
            for name in names:
                self.blame(str(name), Cause(cause), step)

    def _take_repair(self, event: Record) -> None:
        onset_step, restored_step = event.get("onset_step"), event.get("restored_step")
        if isinstance(onset_step, int) and isinstance(restored_step, int):
            self._went_back(restored_step)

    def _take_change(self, event: Record) -> None:
        step = as_integer(event.get("global_step"))
        match event.get("event"):
            case "trainer.restored" if step is not None:
                self._undone_base = max(self.base, self._undone_base)
                self._undone[:0] = [one for one in self.steps if one.point.step > step]
                self.attempt = event.get("attempt")
                lineage = event.get("lineage")
                self.lineage = lineage if isinstance(lineage, int) else 0
                self.restored(step)
                self.owes_proof |= isinstance(event.get("onset_step"), int)
            case "reward.rebased" if step is not None:
                self.base = step
            case "health.outside_weights":  # the restore was a mistake: the next attempt resumes from what it undid
                self.steps += self._undone
                self.base = max(self.base, self._undone_base)
                self._undone.clear()
                self.owes_proof = True

    def _take_line(self, line: Record, *, knows_distance: bool) -> None:
        if (step := as_integer(line.get("global_step"))) is None:
            return
        self._undone.clear()
        self._undone_base = 0
        mean, low, high = (number_of(line.get(f"grpo_actor/task_reward/{key}")) for key in ("avg", "min", "max"))
        self.admitted(
            StepFigures(
                point=RewardPoint(step=step, mean=mean, low=low, high=high),
                truncated_share=number_of(line.get("grpo_actor/no_eos_ratios/avg")),
                distance=number_of(line.get("grpo_actor/logprob_distance/avg")) if knows_distance else math.nan,
            )
        )


def rounds_of(series: RewardSeries, attempt: int) -> list[CanaryRound]:
    """What a predecessor last found of the verifier, if that was bad: as one round that still accuses it. `attempt`:
    the one under way."""
    event = series.accusation
    if event is None:
        return []
    step = event.get("global_step")
    said = f"{event.get('reason')} (seen before the monitor was restarted)"
    said = said if event.get("attempt") == attempt else LAST_ATTEMPT_BROKE
    score = CanaryScore(name="reward", expected=0.0, got=math.nan, error=said)
    return [CanaryRound(step=step if isinstance(step, int) else series.next_step, scores=(score,))]
