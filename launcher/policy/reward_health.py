"""Do the rewards show that something broke? And what: the reward function, a server, or the policy itself.

Two detectors over the run's valid steps: a streak of steps with nothing but zeros, and a fall against the run's own
baseline (launcher/policy/change_point.py). They find *that*; `find_cause` finds *what*, in this order:
known answers scored wrongly accuse the reward function, a server with other weights since the onset accuses
that server, and only what neither explains is a collapse of the policy.

Before a fall is believed, and before the first step after a restore, the run's own record is asked
(launcher/policy/canary_policy.py): `low_since` says when, `restore_contradicted` what the first batch after a restore
shows. A checkpoint is its own witness (P12): weights that earn far less than they earned when they were saved are not
what changed.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.base.messages import Cause, Incident
from launcher.base.rollouts import mean_of
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.canary_policy import STANDARD_ERRORS, CanaryRound, CanaryScore, CanaryVerdict
from launcher.policy.change_point import RewardDrop, credited_noise, estimate_noise, find_fall

SAME_TIME_STEPS = 3
"""How far the estimated onset of a fall may be from the fault that made it."""
LOW = 3.0
"""Standard deviations of a step below the baseline, from which on a batch is low."""
EDGE = 0.6
"""Share of the deepest fall that the first step of an edge shows."""
WITNESS_STEPS = 20
"""Steps up to a checkpoint, whose mean reward is what it earned when it was saved."""
UNSURE_ONCE = 3.0
"""As `UNSURE`, of one comparison in place of many: the first batch after a restore.

Of 45,000 healthy batches (8, 16 and 128 answers of 0 or 1, 5 to 60 steps known) 6 were believed to contradict, and 144
with 0; of batches of 128 answers that fell from 0.5 to 0.02, a third with 5 steps known, 82 % with 20, all with 60."""
LEAST_STEPS = 5
"""Fewer say nothing about what is usual."""
ZEROS_BY_CHANCE = 1e-6
"""A streak of zeros that a hard task, where steps without a reward are usual, shows more often than that is chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPoint:
    """One step's rewards: `mean`, `low` and `high` over its rollouts."""

    step: int
    mean: float
    low: float
    high: float

    @property
    def is_zero(self) -> bool:
        return self.low == self.high == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerLevel:
    """Since `since_step` rewards are far below what was usual, and the gate has rejected as many batches as it may.
    `is_settled`: enough steps are known by now for a fall to have been found."""

    since_step: int
    is_settled: bool


class Level(enum.StrEnum):
    """SOUND: continue. ALERT: report it, continue. BREAK: no further optimizer step before the cause is known."""

    SOUND = "SOUND"
    ALERT = "ALERT"
    BREAK = "BREAK"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardVerdict:
    """`onset_step`: the first step that shows it, as estimated; None where SOUND. `drop`: by how much the mean fell
    from that of the last steps before it. `is_sharp`: as of an `Incident`."""

    level: Level
    reason: str
    onset_step: int | None = None
    drop: float | None = None
    is_sharp: bool = False


def judge_rewards(
    series: Sequence[RewardPoint], settings: RewardHealthConfig, *, restored_step: int | None = None
) -> RewardVerdict:
    """The verdict on the run's valid steps, oldest first (of a step that was repeated, only its last result).

    `restored_step`: of the last restore, if any; for `probation_steps` after it thresholds are tighter.
    """
    if not series:
        return RewardVerdict(level=Level.SOUND, reason="no step yet")
    if not math.isfinite(series[-1].mean):
        reason = f"mean reward {series[-1].mean:.3g}"
        return RewardVerdict(level=Level.BREAK, reason=reason, onset_step=series[-1].step)
    factor = _tightening(series[-1].step, restored_step, settings)
    verdicts = (_judge_fall(series, settings, factor), judge_zeros(series, settings, restored_step=restored_step))
    broken = [verdict for verdict in verdicts if verdict.level is Level.BREAK]
    alerts = [verdict for verdict in verdicts if verdict.level is Level.ALERT]
    return next(iter([*broken, *alerts]), RewardVerdict(level=Level.SOUND, reason=_recent_text(series)))


def _tightening(step: int, restored_step: int | None, settings: RewardHealthConfig) -> float:
    on_probation = restored_step is not None and step - restored_step <= settings.probation_steps
    return settings.probation_factor if on_probation else 1.0


def judge_zeros(
    series: Sequence[RewardPoint], settings: RewardHealthConfig, *, restored_step: int | None = None
) -> RewardVerdict:
    """The part of `judge_rewards` that is about steps without any reward; at least one step is known."""
    factor = _tightening(series[-1].step, restored_step, settings)
    streak = sum(1 for _ in itertools.takewhile(lambda point: point.is_zero, reversed(series)))
    before = series[: len(series) - streak][-settings.baseline_steps :]
    usual = sum(point.is_zero for point in before)
    by_chance = _longest_by_chance(usual, len(before))
    limits = (
        (Level.BREAK, settings.zero_breaker_steps, by_chance),
        (Level.ALERT, settings.zero_alert_steps, by_chance // 2),
    )
    for level, steps, usual_steps in limits:
        if steps is not None and streak >= max(1, math.floor(steps * factor), usual_steps):
            seldom = f", as in {usual} of the {len(before)} steps before" if usual else ""
            reason = f"every reward was 0 for {streak} steps in a row{seldom}"
            return RewardVerdict(level=level, reason=reason, onset_step=series[-streak].step)
    return RewardVerdict(level=Level.SOUND, reason="")


def never_rewarded(series: Sequence[RewardPoint], rounds: Sequence[CanaryRound]) -> bool:
    """Did the reward function give nothing but 0, from the first step on, to known answers too? Then what reads the
    answers may be at fault, and not only the policy."""
    known = any(score.got for one in rounds for score in one.scores)
    return bool(series) and series[0].step == 0 and all(point.is_zero for point in series) and not known


def _longest_by_chance(zeros: int, steps: int) -> int:
    """Steps in a row without a reward that are chance, where so many of so many steps had none (rule of succession)."""
    return math.ceil(math.log(ZEROS_BY_CHANCE) / math.log((zeros + 1) / (steps + 2))) if zeros else 0


def _judge_fall(series: Sequence[RewardPoint], settings: RewardHealthConfig, factor: float) -> RewardVerdict:
    if settings.fall_threshold is None:
        return RewardVerdict(level=Level.SOUND, reason="")
    recent = series[-(settings.window_steps + settings.baseline_steps) :]
    fall = find_fall(
        [point.mean for point in recent],
        settings,
        reward_range=_range(recent),
        threshold=settings.fall_threshold * factor,
    )
    if fall is None:
        return RewardVerdict(level=Level.SOUND, reason="")
    onset_step = recent[fall.onset].step
    reason = (
        f"mean reward fell from {fall.before:.3g} to {fall.after:.3g} at about step {onset_step} "
        f"({fall.score:.1f} standard errors, noise {fall.noise:.2g})"
    )
    return RewardVerdict(
        level=Level.BREAK,
        reason=reason,
        onset_step=onset_step,
        drop=mean_of([point.mean for point in recent[: fall.onset][-WITNESS_STEPS:]]) - fall.after,
        is_sharp=_is_sharp([point.mean for point in recent], fall),
    )


def _is_sharp(means: Sequence[float], fall: RewardDrop) -> bool:
    """A slope is dated within some steps; an edge, whose first step has fallen most of the way, exactly."""
    last = mean_of(means[max(0, fall.onset - SAME_TIME_STEPS) : fall.onset])
    fallen = fall.before - means[fall.onset]
    is_edge = fallen > max(LOW * fall.noise, EDGE * (fall.before - min(means[fall.onset :])))
    return is_edge and last > fall.before - fall.noise


def low_since(
    point: RewardPoint, series: Sequence[RewardPoint], settings: RewardHealthConfig, *, restored_step: int | None = None
) -> int | None:
    """Since when the rewards may be low, where this batch is low enough to ask the run's own record before it is
    trained on; else None. `restored_step`: as of `judge_rewards`, so that no fall is believed that was not asked about.
    """
    known = series[-settings.baseline_steps :]
    if len(known) < LEAST_STEPS or not math.isfinite(point.mean):
        return None
    mean, noise = _level(known, settings)
    verdict = judge_rewards([*series, point], settings, restored_step=restored_step)
    if verdict.level is Level.BREAK:
        return verdict.onset_step
    return point.step if point.mean < mean - LOW * noise else None


def as_learned(
    replayed: CanaryScore | None, healthy: Sequence[RewardPoint], settings: RewardHealthConfig
) -> CanaryScore | None:
    """`replayed` with what its prompts should earn now: as much more as the run has learned since their steps.

    Else prompts of weaker weights would vouch for a policy that fell back to what it was. Never less: where the run
    slipped since, what they earned is still what is asked for. A step that is not among the `healthy` counts as it is.
    """
    recent = healthy[-WITNESS_STEPS:]
    if replayed is None or not replayed.steps or len(recent) < LEAST_STEPS:
        return replayed
    now, noise = mean_of([point.mean for point in recent]), _credited_noise(healthy, settings)
    then = {point.step: point.mean for point in healthy}
    learned = mean_of([now - then.get(step, now) for step in replayed.steps])
    if learned <= 0:
        return replayed
    error = noise * math.sqrt(1 / len(recent) + 1 / len(set(replayed.steps)))
    tolerance = math.hypot(replayed.tolerance, STANDARD_ERRORS * error)
    return replace(replayed, expected=replayed.expected + learned, tolerance=tolerance)


def restore_evidence(
    point: RewardPoint, saved: Sequence[RewardPoint], replayed: CanaryScore | None, settings: RewardHealthConfig
) -> tuple[float, ...]:
    """How far the first batch after a restore, and the prompts answered again, are below what the weights earned when
    they were saved, in standard errors; nothing where one of them is not below.

    `saved`, `replayed`: as of `restore_contradicted`.
    """
    known, replayed = saved[-WITNESS_STEPS:], as_learned(replayed, saved, settings)
    if len(known) < LEAST_STEPS or not math.isfinite(point.mean):
        return ()
    drop = mean_of([one.mean for one in known]) - point.mean
    own = [] if replayed is None else [replayed.errors_low]
    evidence = (drop / _credited_noise(saved, settings), *own)
    return () if drop < settings.fall_min_drop * _range([*known, point]) or min(evidence) < 1 else evidence


def restore_contradicted(
    point: RewardPoint,
    saved: Sequence[RewardPoint],
    replayed: CanaryScore | None,
    settings: RewardHealthConfig,
    *,
    earlier: Sequence[float] = (),
) -> str:
    """Why the first batch after a restore shows that the weights were not what changed; "" where it does not.

    `saved`: the steps up to the checkpoint. `replayed`: prompts of those steps, answered again by the restored weights;
    None: none were, and then the batch alone must be far below; else both below, and together as far (the sum of
    independent standard errors, Stouffer 1949). `earlier`: the evidence after the restores just before this one, which
    was too little alone: two checkpoints that both earn less than they did are likelier one cause outside than two
    collapses.
    """
    evidence = restore_evidence(point, saved, replayed, settings)
    together = (*evidence, *earlier)
    if not evidence or sum(together) / math.sqrt(len(together)) < STANDARD_ERRORS:
        return ""
    known, replayed = saved[-WITNESS_STEPS:], as_learned(replayed, saved, settings)
    again = "" if replayed is None else f", and {replayed.name} {replayed.got:.3g} in place of {replayed.expected:.3g}"
    before = ", as after the restore before it" if earlier else ""
    earned = mean_of([one.mean for one in known])
    return (
        f"the weights of step {known[-1].step} earn {point.mean:.3g} now, and earned {earned:.3g} when they were saved"
        f"{again}{before}: what changed is not the weights"
    )


def has_learned(series: Sequence[RewardPoint], onset_step: int | None, settings: RewardHealthConfig) -> bool:
    """Were the rewards before the onset above those of the first steps?"""
    healthy = [point for point in series if onset_step is None or point.step < onset_step]
    first, last = healthy[:LEAST_STEPS], healthy[-LEAST_STEPS:]
    if len(healthy) < 2 * LEAST_STEPS or first[0].step >= LEAST_STEPS:
        return len(healthy) >= 2 * LEAST_STEPS  # the first steps are not known any more: a long run
    rise = _level(last, settings)[0] - _level(first, settings)[0]
    return rise > settings.fall_min_drop * _range(healthy)


def _level(points: Sequence[RewardPoint], settings: RewardHealthConfig) -> tuple[float, float]:
    """Mean, and standard deviation of one step."""
    means = [point.mean for point in points]
    return mean_of(means), estimate_noise(means, settings.noise_floor * _range(points))


def _credited_noise(points: Sequence[RewardPoint], settings: RewardHealthConfig) -> float:
    known = points[-settings.baseline_steps :]
    means = [point.mean for point in known]
    return credited_noise(means, settings, reward_range=_range(known), errors=UNSURE_ONCE)


def _range(points: Sequence[RewardPoint]) -> float:
    return max(point.high for point in points) - min(point.low for point in points) or 1.0


def _recent_text(series: Sequence[RewardPoint]) -> str:
    recent = [point.mean for point in series[-10:]]
    return f"mean reward {sum(recent) / len(recent):.3g} over the last {len(recent)} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFault:
    """Which other weights a server held, and the step under way when it was seen. One that ended or hung explains no
    reward: what it did not finish is trained on nowhere."""

    name: str
    cause: Cause
    since_step: int


def find_cause(
    rewards: RewardVerdict,
    canaries: CanaryVerdict,
    faults: Sequence[ServerFault],
    *,
    since: float,
    had_learned: bool = False,
    staleness: int = 0,
) -> Incident | None:
    """What broke, or None. `since`: when it was first seen, on the clock of whoever decides. `staleness`: how many
    versions old the weights may be whose completions a step trains on: so much earlier may they have been damaged."""
    onsets = [onset for onset in (canaries.onset_step, rewards.onset_step) if onset is not None]
    guilty = _guilty_server(faults, rewards.onset_step)
    onset_step = min(onsets, default=0)
    if canaries.is_broken:
        cause, subject, reason = Cause.VERIFIER_BROKEN, "reward", canaries.reason
    elif rewards.level is not Level.BREAK:
        return None
    elif guilty is not None:
        cause, subject, reason = guilty.cause, guilty.name, rewards.reason
    else:
        cause, subject, reason = Cause.REWARD_COLLAPSE, "policy", rewards.reason
        onset_step = max(0, onset_step - staleness)
    return Incident(
        cause=cause,
        subject=subject,
        reason=reason,
        since=since,
        onset_step=onset_step,
        evidence={"canaries": canaries.reason, "rewards": rewards.reason},
        had_learned=had_learned,
        is_sharp=rewards.is_sharp,
    )


def _guilty_server(faults: Sequence[ServerFault], onset_step: int | None) -> ServerFault | None:
    """A fault that began when the rewards fell. One of another time explains nothing: servers fail every day."""
    if onset_step is None:
        return None
    near = [fault for fault in faults if abs(fault.since_step - onset_step) <= SAME_TIME_STEPS]
    return min(near, key=lambda fault: abs(fault.since_step - onset_step), default=None)


def distance_drifted(first: float, now: float | None, *, least: float, factor: float) -> str:
    """Why servers and trainer are usually farther apart than in the run's first steps, "" where they aren't: each batch
    alone may be as near as those before it. Nats; below `least` it is the rounding of any run."""
    if now is None or now <= max(least, factor * first):
        return ""
    return f"log-probs of the servers are usually {now:.2g} from the trainer's, {first:.2g} at first"
