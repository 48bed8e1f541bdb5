"""Did the mean reward fall, and since when? A generalised likelihood ratio test against the run's own baseline.

For each possible onset within the window, the mean since then is compared with the mean of the steps before it; the
score is their difference in standard errors, and the alarm the largest score above the threshold (Willsky and Jones
1976, "A generalized likelihood ratio approach"; Gaussian, one-sided, known variance). Against a CUSUM: no drift to
choose, the size of the fall is estimated, the onset comes with the alarm, and a baseline that lies before each
suspected onset is not dragged along by the fall, while it follows a run that learns.

The noise is taken from differences of neighbouring steps, which a trend does not inflate. One step counts at most
`outlier_clip` standard deviations, so that no single hard batch can raise an alarm. In a young run the noise itself is
estimated badly, so a deeper fall is asked for (`UNSURE`). The step since when is that of a broken line, fitted to the
same steps (launcher/policy/broken_line.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.config.supervision import RewardHealthConfig
from launcher.policy.broken_line import LEAST_BEFORE, date_fall

RELATIVE_VARIANCE = 0.83
"""Of an estimate of the noise from n differences of neighbours, times n: Gaussian steps; two differences share each."""
UNSURE = 5.0
"""Standard errors of that estimate, beyond those of a whole baseline, by which the noise may be larger.

Healthy runs of 60 steps (8 and 32 answers of 0 or 1 a step, 30 to 80 % right, a baseline from step 5 or 20 on): of
3,600, 15 were accused with 0 and none with 5; of 3,600 on probation, 129 and 26. A fall to 0 at step 20 is found up to
two steps later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDrop:
    """A fall of the mean from `before` to `after`, `score` standard errors deep. `onset` indexes the series given."""

    onset: int
    before: float
    after: float
    noise: float
    score: float


def find_fall(
    means: Sequence[float], settings: RewardHealthConfig, *, reward_range: float, threshold: float
) -> RewardDrop | None:
    """The most likely fall that lasts until the end of `means`, or None.

    `means`: of the last `window_steps + baseline_steps` steps or fewer, oldest first; more would only be slower.
    """
    sums = list(itertools.accumulate(means, initial=0.0))
    noise = credited_noise(means, settings, reward_range=reward_range, errors=UNSURE)
    lengths = range(1, min(settings.window_steps, len(means) - settings.warmup_steps) + 1)
    falls = (_fall(means, sums, len(means) - n, noise, settings, threshold) for n in lengths)
    likely = [fall for fall in falls if fall and fall.before - fall.after >= settings.fall_min_drop * reward_range]
    if not likely:
        return None
    best = max(likely, key=lambda fall: fall.score)
    if best.onset < LEAST_BEFORE:
        return best  # a line needs more steps before it
    first = max(0, best.onset - settings.baseline_steps - LEAST_BEFORE)
    # The likeliest step of a slope is in its middle; whoever restores needs its beginning.
    dated = date_fall(means, first=first, noise=noise, top=best.before, near=best.onset)
    return replace(best, onset=dated.onset)


def estimate_noise(means: Sequence[float], floor: float = 0.0) -> float:
    """Standard deviation of one step's mean: for normal noise E|x − y| = 2σ/√π, whatever the (slow) trend."""
    if len(means) < 2:
        return floor
    differences = [abs(b - a) for a, b in itertools.pairwise(means)]
    return max(floor, math.sqrt(math.pi) / 2 * sum(differences) / len(differences))


def credited_noise(
    means: Sequence[float], settings: RewardHealthConfig, *, reward_range: float, errors: float
) -> float:
    """Standard deviation of one step's mean, as large as it may well be: `errors` standard errors of its estimate more,
    beyond those of a whole baseline."""
    noise = estimate_noise(means, settings.noise_floor * reward_range)
    return noise * (1 + errors * _unsure(len(means), settings))


def _unsure(steps: int, settings: RewardHealthConfig) -> float:
    """How much worse the noise is known than with a whole baseline: the difference of the relative standard errors."""
    here, usual = (math.sqrt(RELATIVE_VARIANCE / max(1, n - 1)) for n in (steps, settings.baseline_steps))
    return max(0.0, here - usual)


def _fall(
    means: Sequence[float],
    sums: Sequence[float],
    onset: int,
    noise: float,
    settings: RewardHealthConfig,
    threshold: float,
) -> RewardDrop | None:
    """The fall that began at `onset`, where it is deep enough. `sums[i]` is the sum of the first i means."""
    n_after, n_before = len(means) - onset, min(settings.baseline_steps, onset)
    before = (sums[onset] - sums[onset - n_before]) / n_before
    after = (sums[-1] - sums[onset]) / n_after
    error = noise * math.sqrt(1 / n_after + 1 / n_before)
    if before - after <= threshold * error:
        return None  # clipping only lessens the score: most onsets end here
    clipped = sum(min(before - mean, settings.outlier_clip * noise) for mean in means[onset:])
    score = clipped / n_after / error
    return RewardDrop(onset=onset, before=before, after=after, noise=noise, score=score) if score > threshold else None
