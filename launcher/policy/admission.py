"""May this batch be trained on? The gate's decision, from what is known of the batch and of those before it.

A batch that a failure made must never reach the optimizer (P1). Each rule names what it saw; there are two kinds:

    certain   no sound run breaks them: a reward or a token is missing, a number is not finite, the weights are others
    compared  a sound run breaks them seldom: far from what is usual, which may also be a change of the policy itself.
              They reject COMPARED_REJECTIONS in a row at most; what lasts launcher/policy/reward_health.py judges
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from launcher.base.messages import Cause, Incident
from launcher.base.rollouts import RolloutBatch, mean_of
from launcher.base.wording import counted
from launcher.config.schema import RunConfig
from launcher.config.supervision import GateConfig
from launcher.policy.canary_policy import CanaryScore
from launcher.policy.change_point import estimate_noise
from launcher.policy.reward_health import RewardPoint

COMPARED_REJECTIONS = 2
"""In a row, of batches that only differ from the usual: with more, a change that stays would stop the run."""
DISTANCE_FACTOR = 4.0
"""On the usual distance: rounding varies from batch to batch, and other weights are farther: in float32 those of one
step before, in bfloat16 those of ten."""
MOST_ROUNDING = 10.0
"""On gate.distance_float32: how far the usual distance may raise it. Rounding grows with the weights, but one step at
3e-4 moves log-probs by 8e-4."""
USUAL_STEPS = 20
"""Last steps whose medians count as usual: with more, what was learned since would be compared with the untrained."""
USUAL_MIN_STEPS = 5
"""Before that the median of a few steps is chance, and a healthy batch would be rejected."""
SHARE_FACTOR = 2.0
"""How much farther than the batch as a total one server's share of it may be: fewer tokens, more noise."""
VERSIONS_OF_DISTANCE_UNKNOWN = 20
"""Steps in which weights move by about gate.distance_unknown at most: the first ones were 0.2 away after 40."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What the gate decides by. Counts are of completions, `weight_versions` those their tokens came from.

    `truncated`: cut at the token limit; `blank`: with tokens, but without text. `requests` has one for each try of a
    prompt's whole group, `failed` those of them that ended without the group's completions. `logprob_distance`: mean
    |server's - trainer's log-prob| in nats, known once the gradients are; None before; `distances`: the same of each
    server's share alone. Where older weights made a part of the batch, both are of the other part; where they made all
    (`is_of_older`), of all. `older` has for each server and older version the distance to the trainer's weights of
    today. `usual_distance`: of the trainer's last steps, None where too few are known. `canaries`: the known answers,
    as they were scored with this batch. `can_check`: the trainer can ask the run's own record about it, and has not
    yet. `replayed`: what prompts of healthy steps earned when it had. `question`: the same where it is asked again
    because its answer was late. `lineage`: how many restores lie behind the weights.
    """

    policy_version: int
    weight_versions: tuple[int, ...]
    completions: int
    without_reward: int
    empty: int
    nonfinite_logprobs: int
    uneven_groups: int
    global_step: int = -1
    requests: int = 0
    failed: int = 0
    truncated: int = 0
    blank: int = 0
    mean_reward: float | None = None
    low_reward: float | None = None
    high_reward: float | None = None
    logprob_distance: float | None = None
    distances: Mapping[str, float] = field(default_factory=dict)
    is_of_older: bool = False
    older: tuple[tuple[str, int, float], ...] = ()
    usual_distance: float | None = None
    canaries: tuple[CanaryScore, ...] = ()
    can_check: bool = False
    replayed: CanaryScore | None = None
    question: str = ""
    lineage: int | None = None

    @classmethod
    def of(cls, batch: RolloutBatch, *, policy_version: int, n_samples: int, global_step: int = -1) -> BatchReport:
        completions = [rollout.completion for rollout in batch.rollouts]
        rewards = [r.reward for r in batch.rollouts if r.reward is not None and math.isfinite(r.reward)]
        return cls(
            policy_version=policy_version,
            weight_versions=batch.weight_versions,
            completions=len(completions),
            without_reward=len(completions) - len(rewards),
            empty=sum(not c.token_ids for c in completions),
            nonfinite_logprobs=sum(not all(map(math.isfinite, c.logprobs)) for c in completions),
            uneven_groups=sum(len(group.rollouts) != n_samples for group in batch.all_groups),
            global_step=global_step,
            requests=batch.failed + (len(batch.all_groups) if batch.made is None else batch.made),
            failed=batch.failed - batch.unscored,
            truncated=sum(c.finish_reason == "length" for c in completions),
            blank=sum(bool(r.completion.token_ids) and not r.text.strip() for r in batch.rollouts),
            mean_reward=mean_of(rewards) if rewards else None,
            low_reward=min(rewards, default=None),
            high_reward=max(rewards, default=None),
        )

    @property
    def figures(self) -> StepFigures:
        """What is kept of its step, once it is admitted."""
        return StepFigures(
            point=RewardPoint(
                step=self.global_step,
                mean=_number(self.mean_reward),
                low=_number(self.low_reward),
                high=_number(self.high_reward),
            ),
            truncated_share=self.truncated_share,
            blank_share=self.blank_share,
            distance=_number(None if self.is_of_older else self.logprob_distance),
        )

    @property
    def failed_share(self) -> float:
        return self.failed / max(self.requests, 1)

    @property
    def truncated_share(self) -> float:
        return self.truncated / max(self.completions, 1)

    @property
    def blank_share(self) -> float:
        return self.blank / max(self.completions, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRules:
    """The rules of one run. `is_exact`: both compute in float32; log-probs of the same weights agree to 1e-7."""

    settings: GateConfig
    is_exact: bool
    versions_behind: int

    @classmethod
    def of(cls, config: RunConfig) -> GateRules:
        return cls(
            settings=config.gate,
            is_exact={config.sglang.dtype, config.actor.dtype} == {"float32"},
            versions_behind=config.rollout.max_head_offpolicyness,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What later batches are compared with, of one step. NaN where it isn't known."""

    point: RewardPoint
    truncated_share: float = math.nan
    blank_share: float = math.nan
    distance: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualValues:
    """The last steps of the run, as medians; `reward_range`: from the least to the greatest single reward in them;
    `reward_noise`: standard deviation of one step's mean reward. What isn't known is NaN, a share 1: nothing is above
    it. `distance` is None before the first step whose distance is known, `first_distance` that of the first steps."""

    mean_reward: float
    reward_range: float
    reward_noise: float
    truncated_share: float
    blank_share: float
    distance: float | None = None
    first_distance: float = math.inf

    @classmethod
    def of(cls, steps: Sequence[StepFigures], *, since: float = 0, first: Sequence[StepFigures] = ()) -> UsualValues:
        """`since`: a change that stayed; of all but the distance only later steps are usual. `first`: of the run."""
        distances = _known(step.distance for step in steps)
        level = [step for step in steps if step.point.step >= since]
        means = [step.point.mean for step in level]
        highs, lows = [step.point.high for step in level], [step.point.low for step in level]
        return cls(
            mean_reward=median(means or [math.nan]),
            reward_range=max(highs, default=math.nan) - min(lows, default=math.nan),
            reward_noise=estimate_noise(means),
            truncated_share=median(_known(step.truncated_share for step in level) or [1.0]),
            blank_share=median(_known(step.blank_share for step in level) or [1.0]),
            distance=median(distances) if distances else None,
            first_distance=median(_known(step.distance for step in first) or [math.inf]),
        )


OF_WEIGHTS = frozenset({Cause.SERVER_STALE, Cause.SERVER_CORRUPT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`cause`: what the reason points to, where it points to something; `subjects`: whose failure, where that is known.
    `is_compared`: rejected only for being far from what is usual. `check_before`: no answer yet: the run's own record
    of the steps before this one is to be asked first."""

    admitted: bool
    reason: str
    cause: Cause | None = None
    subjects: tuple[str, ...] = ()
    is_compared: bool = False
    check_before: int | None = None

    @property
    def accused(self) -> tuple[str, ...]:
        """Servers that may hold other weights than the trainer's, where it is known which."""
        return self.subjects if self.cause in OF_WEIGHTS else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFault:
    reason: str
    cause: Cause
    subjects: tuple[str, ...] = ()


def admit(
    report: BatchReport,
    gate: GateRules,
    *,
    usual: UsualValues | None = None,
    compared_in_a_row: int = 0,
    incident: Incident | None = None,
) -> Admission:
    """Admit a batch only if every completion is complete, scored, and from the weights being trained.

    `usual`: None as long as the run has too few steps to compare with. `compared_in_a_row`: batches that comparison
    alone has rejected since the last step. `incident`: the damage that is known; nothing is trained on while it lasts,
    and it explains why a batch is unusual.
    """
    certain = [
        *_incomplete(report),
        *_wrong_weights(report, gate.versions_behind),
        *_too_many(report, gate.settings),
        *_distant(report, gate, usual),
    ]
    if certain:
        return _reject(certain)
    if incident is not None:
        return Admission(admitted=False, reason=incident.reason, cause=incident.cause, subjects=(incident.subject,))
    if usual is not None and compared_in_a_row < COMPARED_REJECTIONS:
        unusual = _unusual(report, gate.settings, usual)
        if unusual:
            return _reject(unusual, is_compared=True)
    return Admission(admitted=True, reason="complete, scored and current")


def _reject(faults: Sequence[BatchFault], *, is_compared: bool = False) -> Admission:
    return Admission(
        admitted=False,
        reason="; ".join(fault.reason for fault in faults),
        cause=faults[0].cause,
        subjects=faults[0].subjects,
        is_compared=is_compared,
    )


def _incomplete(report: BatchReport) -> list[BatchFault]:
    counts = (
        (report.without_reward, "completion", " without a reward", Cause.VERIFIER_BROKEN),
        (report.empty, "empty completion", "", Cause.SERVER_CORRUPT),
        (report.nonfinite_logprobs, "completion", " with non-finite log-probs", Cause.SERVER_CORRUPT),
        (report.uneven_groups, "incomplete group", "", Cause.SERVER_CRASH),
        (sum(one.got is None for one in report.canaries), "known answer", " without a reward", Cause.VERIFIER_BROKEN),
    )
    faults = [BatchFault(reason=counted(n, what, more=more), cause=cause) for n, what, more, cause in counts if n]
    return faults if report.completions else [BatchFault(reason="no completions", cause=Cause.SERVER_CRASH), *faults]


def _wrong_weights(report: BatchReport, allowed_behind: int) -> list[BatchFault]:
    """A version ahead of the trainer's is as wrong as an old one: it is from before a restore."""
    behind = [report.policy_version - version for version in report.weight_versions]
    if all(0 <= by <= allowed_behind for by in behind):
        return []
    wanted = f"{report.policy_version}" if allowed_behind == 0 else f"{allowed_behind} behind {report.policy_version}"
    reason = f"weight versions {list(report.weight_versions)}, not {wanted}"
    return [BatchFault(reason=reason, cause=Cause.SERVER_STALE)]


def _too_many(report: BatchReport, settings: GateConfig) -> list[BatchFault]:
    """Where most requests fail, those that come through are no sample of the policy: the short ones come through."""
    if settings.max_failed_share is None or report.failed_share <= settings.max_failed_share:
        return []
    reason = f"{report.failed_share:.0%} of the requests failed (gate.max_failed_share)"
    return [BatchFault(reason=reason, cause=Cause.SERVER_CRASH)]


def _distant(report: BatchReport, gate: GateRules, usual: UsualValues | None) -> list[BatchFault]:
    """Another model than the trainer's made these tokens, whatever its label. Written so that NaN is distant."""
    known, first = (None, math.inf) if usual is None else (usual.distance, usual.first_distance)
    if known is None and gate.is_exact:  # where it can only raise the limit: another machine may round otherwise
        known = report.usual_distance
    own = distance_limit(gate, known, first)
    if report.logprob_distance is None or own is None:
        return []
    of_older = max(own, gate.settings.distance_unknown)  # by permission: how far those are isn't known
    limit = of_older if report.is_of_older else own
    is_near = all(by <= SHARE_FACTOR * limit for by in report.distances.values())
    key = f"gate.{'distance_float32' if gate.is_exact else 'distance_bfloat16'}"
    if report.logprob_distance <= limit and is_near:
        return _apart(report.older, of_older)
    far = {name: by for name, by in report.distances.items() if not by <= limit}
    worst = max(far.values(), key=lambda by: math.inf if math.isnan(by) else by, default=report.logprob_distance)
    reason = (
        f"log-probs of {' and '.join(far) or 'the server'} are {worst:.2g} from the trainer's, more than {limit:.2g} "
    )
    cause = _cause_of_distance(worst, report, gate.settings)
    return [BatchFault(reason=f"{reason}({key})", cause=cause, subjects=tuple(far))]


def _cause_of_distance(distance: float, report: BatchReport, settings: GateConfig) -> Cause:
    """Damaged, where the version was the right one and no older version of this run is so far away; else stale."""
    oldest = settings.distance_unknown * max(1.0, report.policy_version / VERSIONS_OF_DISTANCE_UNKNOWN)
    is_far = report.weight_versions == (report.policy_version,) and not distance <= oldest
    return Cause.SERVER_CORRUPT if is_far else Cause.SERVER_STALE


def _apart(shares: Sequence[tuple[str, int, float]], limit: float) -> list[BatchFault]:
    """Of what older weights made by permission: each server's share of a version is judged alone."""
    apart = [one for one in shares if not one[2] <= SHARE_FACTOR * limit]
    far = ", ".join(f"{name} at version {version} by {by:.2g}" for name, version, by in apart)
    reason = f"log-probs of older weights are more than {limit:.2g} from the trainer's (gate.distance_unknown): {far}"
    names = tuple(dict.fromkeys(name for name, _, _ in apart))
    return [BatchFault(reason=reason, cause=Cause.SERVER_STALE, subjects=names)] if far else []


def distance_limit(gate: GateRules, usual: float | None = None, first: float = math.inf) -> float | None:
    """How far log-probs may be at the weights that the tokens are of, in nats; None: switched off. Rounding grows with
    the model and its weights, so the run's `usual` distance raises the limit: at most to so many times that of the
    `first` steps, as a slow drift is followed no further."""
    settings = gate.settings
    if gate.is_exact:
        least = unknown = settings.distance_float32
        most = math.inf if least is None else MOST_ROUNDING * least
    else:
        least, unknown = settings.distance_bfloat16, settings.distance_unknown
        most = max(settings.distance_unknown, DISTANCE_FACTOR * first)
    if least is None or unknown is None:
        return None
    return max(least, unknown if usual is None else min(DISTANCE_FACTOR * usual, most))


def _unusual(report: BatchReport, settings: GateConfig, usual: UsualValues) -> list[BatchFault]:
    """No sign of damaged weights: log-probs were compared before."""
    reasons, mean, before = [], report.mean_reward, usual.mean_reward
    if mean is not None and settings.max_reward_jump is not None:
        chance = settings.reward_jump_noise * usual.reward_noise  # of 8 rollouts, all fail by chance now and then
        if abs(mean - before) > max(settings.max_reward_jump * (usual.reward_range or 1.0), chance):
            reasons.append(f"mean reward {mean:.3g}, usually {before:.3g} (gate.max_reward_jump)")
    shares = (
        ("cut at the token limit", report.truncated_share, usual.truncated_share),
        ("blank", report.blank_share, usual.blank_share),
    )
    for name, share, usually in shares:
        if settings.max_share_jump is not None and share - usually > settings.max_share_jump:
            reasons.append(f"{share:.0%} of the completions {name}, usually {usually:.0%} (gate.max_share_jump)")
    return [BatchFault(reason=reason, cause=Cause.REWARD_COLLAPSE) for reason in reasons]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _known(figures: Iterable[float]) -> list[float]:
    return [figure for figure in figures if math.isfinite(figure)]
