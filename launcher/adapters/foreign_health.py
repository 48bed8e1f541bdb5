"""What the steps and checkpoints of another project's trainer show, as pure functions over the launcher's own policies.

Rung A has no gate: a step is judged after it was trained on. So damage is found as soon as it shows, and undone by a
checkpoint from before its onset; it is not kept out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from launcher.adapters.trainer_adapter import FoundCheckpoint, StepSeen
from launcher.base.messages import Cause, Incident
from launcher.base.rollouts import mean_of
from launcher.config.schema import RunConfig
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import STANDARD_ERRORS, CanaryVerdict
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus, checkpoint_status
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.policy.reward_health import (
    LEAST_STEPS,
    WITNESS_STEPS,
    Level,
    RewardPoint,
    RewardVerdict,
    find_cause,
    has_learned,
    restore_evidence,
)
from launcher.run_files.journal import Record, number_of

REPORTS = 20
NONFINITE_STEPS = 2
"""In a row, as for the launcher's own trainer: one alone may pass."""
NOT_OURS = "move it away, or, for conf=command, set trainer.checkpoint_file to the file that is written last into each"
NO_CANARIES = CanaryVerdict(is_broken=False, reason="none: the reward function is the trainer's own")
REWARD, AREALS_REWARD, SPREAD = "rollout/reward", "grpo_actor/task_reward/avg", "grpo_actor/task_reward/std"
STEP_S, NONFINITE = "timeperf/step_s", "trainer/nonfinite"


def metrics_line(seen: StepSeen, *, attempt: int, time: float, step_s: float | None) -> dict[str, object]:
    """A line of metrics.jsonl (docs/files.md), of what was seen and nothing else."""
    reward = math.nan if "reward" in seen.nonfinite else seen.reward
    figures = {REWARD: reward, AREALS_REWARD: reward, SPREAD: seen.spread, STEP_S: step_s}
    line: dict[str, object] = {"global_step": seen.step, "attempt": attempt, "time": time}
    line |= {name: value for name, value in figures.items() if value is not None}
    return line | ({NONFINITE: len(seen.nonfinite)} if seen.nonfinite else {})


def points_of(lines: Sequence[Record]) -> list[RewardPoint]:
    """Of the current lines of metrics.jsonl: the steps with a reward that is a number.

    The lowest and the highest reward of a step are not known. A mean of exactly 0 counts as nothing but zeros unless a
    spread contradicts it; else the mean, and a standard deviation on both sides, are all that is known of the range.
    """
    points = []
    for line in lines:
        step, mean, spread = line.get("global_step"), number_of(line.get(REWARD)), number_of(line.get(SPREAD), 0.0)
        if isinstance(step, int) and math.isfinite(mean):
            points.append(RewardPoint(step=step, mean=mean, low=mean - spread, high=mean + spread))
    return points


def find_damage(
    lines: Sequence[Record], rewards: RewardVerdict, settings: RewardHealthConfig, *, since: float
) -> Incident | None:
    """What the steps show of the learning, or None. `rewards`: the verdict on the rewards among them. `since`: when the
    last of them was seen."""
    last = lines[-NONFINITE_STEPS:]
    if len(last) == NONFINITE_STEPS and all(line.get(NONFINITE) for line in last):
        onset, steps = last[0].get("global_step"), [int(number_of(line.get("global_step"), -1)) for line in lines]
        reason = f"{NONFINITE_STEPS} steps in a row had figures that are not finite"
        return Incident(
            cause=Cause.NONFINITE,
            subject="trainer",
            reason=reason,
            since=since,
            onset_step=begun_after(onset, steps) if isinstance(onset, int) else None,
        )
    if rewards.level is not Level.BREAK:
        return None
    points = points_of(lines)
    had_learned = has_learned(points, rewards.onset_step, settings)
    found = find_cause(rewards, NO_CANARIES, (), since=since, had_learned=had_learned)
    if found is None or found.onset_step is None:
        return found
    return replace(found, onset_step=begun_after(found.onset_step, [point.step for point in points]))


def begun_after(onset_step: int, steps: Sequence[int]) -> int:
    """The first step that may have begun what shows in `onset_step`. A trainer that reports each tenth step alone gives
    the mean of ten, as TRL does: the report before may hold some of it too, and only the one before that is sound."""
    before = [step for step in steps if step < onset_step][-2:]
    return before[0] + 1 if before and onset_step - before[-1] > 1 else onset_step


def restore_verdict(
    points: Sequence[RewardPoint], restored_step: int, settings: RewardHealthConfig
) -> tuple[bool, str]:
    """Whether the steps after a restore decide about it, and why they contradict it, "" where they don't (P12).

    A step that is not below what the checkpoint earned when it was saved bears it out. Steps that all are contradict it
    once they are far enough below together (Stouffer 1949), and nothing is known after LEAST_STEPS of them.
    """
    saved = [point for point in points if point.step <= restored_step]
    if len(saved) < LEAST_STEPS:
        return True, ""  # what it earned is not known, and a trainer may report no rewards
    since = [point for point in points if point.step > restored_step][:LEAST_STEPS]
    below = 0.0
    for count, point in enumerate(since, 1):
        if not (evidence := restore_evidence(point, saved, None, settings)):
            return True, ""
        below += evidence[0]
        if below / math.sqrt(count) >= STANDARD_ERRORS:
            now, then = (mean_of([one.mean for one in some]) for some in (since[:count], saved[-WITNESS_STEPS:]))
            steps = "" if count == 1 else f" in {count} steps"
            said = f"the weights of step {saved[-1].step} earn {now:.3g} now{steps}, and earned {then:.3g} when they"
            return True, f"{said} were saved: what changed is not the weights"
    return len(since) == LEAST_STEPS, ""


def report_every(lines: Sequence[Record]) -> int:
    """Of how many steps the trainer reports one, by its last reports; 1 where that is not known."""
    steps = [number_of(line.get("global_step")) for line in lines[-REPORTS:]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps) if later > earlier]
    return max(1, round(median(gaps))) if gaps else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """Checkpoints that a start passes over where the weights are not what changed: those trained on the rewards that
    fell, from `onset_step` on, and those that the contradicted incarnation has made, after `restored_step` and since
    `since` (unix seconds; None: known answers showed it, and no restore). They are not condemned. Or, where it ended
    before its first steps bore the restore out or contradicted it (`is_contradicted`), the same of that one."""

    onset_step: int
    restored_step: int
    since: float | None
    is_contradicted: bool = True

    @property
    def why(self) -> str:
        if not self.is_contradicted:
            return f"no step has shown yet whether the restore to step {self.restored_step} helped"
        return f"later ones were trained on the rewards that fell at step {self.onset_step}"

    def holds_of(self, one: FoundCheckpoint) -> bool:
        return one.step >= self.onset_step or self.is_made_by_it(one)

    def is_made_by_it(self, one: FoundCheckpoint) -> bool:
        return self.since is not None and one.step > self.restored_step and one.changed_at >= self.since


def unproven_of(events: Iterable[Record]) -> Unproven | None:
    """What the last start of the command, in whatever attempt, has left so. Of the supervisor's own memory, which is
    ahead of the run's files: these are for people and tools, and nothing acts on them."""
    found, began, onset, to = None, 0.0, None, None
    for event in events:
        match event.get("event"):
            case "health.reward_collapse" | "health.nonfinite":
                onset, to = event.get("onset_step"), None
            case "trainer.restored":
                to = event.get("global_step")
            case "trainer.stepped" | "run.running":  # versions before this one have the second alone
                found, onset = None, None
            case "trainer.starting":
                found, began = None, number_of(event.get("time"), 0.0)
                if isinstance(onset, int) and isinstance(to, int) and FIRST_WEIGHTS != to < onset:
                    found = Unproven(onset_step=onset, restored_step=to, since=began, is_contradicted=False)
            case "health.outside_weights" | "health.verifier_broken" as name:
                if isinstance(onset_step := event.get("onset_step"), int):
                    restored = int(number_of(event.get("global_step"), onset_step))
                    since = began if name == "health.outside_weights" else None
                    found = Unproven(onset_step=onset_step, restored_step=restored, since=since)
    return found


def was_started(events: Iterable[Record]) -> bool:
    """Whether this run, in whatever attempt, has started the command: as `unproven_of`, of the supervisor's memory."""
    return any(event.get("event") == "trainer.starting" for event in events)


def why_not_whole(found: FoundCheckpoint, lines: Sequence[Record]) -> str:
    """ "" where a checkpoint is whole. One that does not show it itself is once a later step was seen after its last
    change: a trainer that writes it between two steps had finished."""
    if found.is_whole is not None:
        return "" if found.is_whole else found.problem
    for line in reversed(lines):
        step = line.get("global_step")
        if isinstance(step, int) and step > found.step and number_of(line.get("time"), 0.0) > found.changed_at:
            return ""
    return "no later step was seen after its last change"


def facts_of(
    found: Sequence[FoundCheckpoint], problems: Mapping[Path, str], lines: Sequence[Record], config: RunConfig
) -> list[CheckpointFacts]:
    """For the choice of a restore. `problems`: of those that are not whole, by path."""
    last = lines[-1].get("global_step") if lines else None
    healthy_until = last if isinstance(last, int) else -1
    return [
        CheckpointFacts(
            global_step=one.step,
            status=CheckpointStatus.UNVERIFIED
            if one.path in problems
            else checkpoint_status(one.step, healthy_until=healthy_until, settings=config.restore).status,
            is_complete=one.path not in problems,
        )
        for one in found
    ]
