"""What speaks for and against a model that degraded, and a reward function that broke."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launcher.diagnosis.judging.evidence import (
    CONNECTION,
    SHARP_STEPS,
    Evidence,
    incidents,
    mean_count,
    seen_in,
    shown,
    times,
)
from launcher.diagnosis.judging.incident_context import IncidentContext
from launcher.diagnosis.judging.onset import Shape
from launcher.diagnosis.reading.log_records import (
    ENTROPY,
    GRAD_NORM,
    KL,
    LOSS,
    N_SEQS,
    NO_EOS,
    SEQ_LEN,
    UPDATED,
    Kind,
)


def of_degradation(context: IncidentContext) -> Iterator[Evidence]:
    yield from incidents(context, "reward_collapse", "nonfinite")
    if context.found is None:
        yield Evidence(weight=-2, text="the rewards did not fall")
        return
    yield from _shape_of_degradation(context)
    yield from _not_finite(context)
    for name, words, factor in ((GRAD_NORM, "gradient norm", 3.0), (KL, "KL to the old policy", 4.0)):
        peak = context.peak_before(name)
        if peak is not None and peak[1] > 0 and peak[0] > factor * peak[1] and not context.count(*CONNECTION):
            yield Evidence(weight=2, text=f"{words} {peak[0]:.3g} at step {peak[2]}, usually {peak[1]:.3g}")
    yield from _changed_completions(context)
    if context.count(*CONNECTION):
        yield seen_in(-2, context.near(*CONNECTION), "connections failed at the same time")
    if context.count(Kind.REWARD_TIMEOUT, Kind.REWARD_ERROR):
        yield Evidence(weight=-1, text="rewards could not be computed at the same time")


def of_reward_function(context: IncidentContext) -> Iterator[Evidence]:
    yield from incidents(context, "verifier_broken")
    late = context.near(Kind.REWARD_TIMEOUT)
    if late and sum(h.count for h in late) > 3 * mean_count(context.earlier(Kind.REWARD_TIMEOUT)):
        yield seen_in(3, late, f"{times(late)} a reward timed out and counted as 0")
    if raised := context.near(Kind.REWARD_ERROR):
        yield seen_in(3, raised, f"{times(raised)} the reward function failed: {shown(raised[0])}")
    if context.found is None:
        if not late and not raised:
            yield Evidence(weight=-2, text="the rewards did not fall")
        return
    fall = context.found.fall
    if fall.shape is Shape.NEVER:
        yield Evidence(weight=3, text="not one reward of the run was above 0")
    elif fall.shape is Shape.DECAY:
        yield Evidence(weight=-1, text="the rewards fell slowly; a function breaks from one step to the next")
    same = _same_completions(context)
    if same and fall.bottom - fall.onset < SHARP_STEPS and not context.count(*CONNECTION):
        yield Evidence(weight=3, text=f"the rewards dropped at once while completions stayed as they were: {same}")
    if context.count(*CONNECTION):
        yield seen_in(-2, context.near(*CONNECTION), "connections failed at the same time")
    changed = [one.text for one in _changed_completions(context) if one.weight > 0]
    if changed:
        yield Evidence(weight=-1, text=f"the completions changed too: {changed[0]}")


def _shape_of_degradation(context: IncidentContext) -> Iterator[Evidence]:
    assert context.found is not None
    fall = context.found.fall
    slope = fall.bottom - fall.onset
    if fall.shape is Shape.DECAY:
        yield Evidence(weight=3, text=f"the rewards fell slowly, over {slope} steps")
    elif fall.shape is Shape.PLATEAU:
        yield Evidence(weight=1, text="the rewards fell to a lower level, not to 0")
    elif fall.shape in (Shape.ZERO, Shape.MISSING) and slope < SHARP_STEPS:
        yield Evidence(weight=-2, text="the rewards were exactly 0 from one step to the next")
    elif fall.shape is Shape.SPIKES and fall.zeros > fall.steps / 3:
        yield Evidence(weight=-2, text="the rewards jump between 0 and the old level: the policy still can")


def _not_finite(context: IncidentContext) -> Iterator[Evidence]:
    assert context.found is not None
    rows, onset = context.found.rows, context.found.fall.onset
    for name, words in ((LOSS, "loss"), (GRAD_NORM, "gradient norm")):
        column = context.contents.steps.column(name)
        had = np.isfinite(column[rows[:onset]]).any()
        lost = [int(row) for row in rows[max(0, onset - 20) : onset + 3] if not np.isfinite(column[row])]
        if had and lost and np.isfinite(column[rows[:onset]]).mean() > 0.9:
            step = int(context.contents.steps.steps[lost[0]])
            yield Evidence(weight=3, text=f"the {words} was not finite at step {step}")
    change = context.change(UPDATED)
    if change is not None and change.before > 0.5 > change.after:
        yield Evidence(weight=1, text="updates no longer succeed (update_successful)")


def _changed_completions(context: IncidentContext) -> Iterator[Evidence]:
    """Entropy, lengths and cut ends, where they moved with the rewards."""
    if context.count(*CONNECTION):
        return
    for name, words in ((ENTROPY, "entropy"), (SEQ_LEN, "length of sequences")):
        change = context.change(name)
        if change is not None and change.is_clear and not 0.7 <= change.ratio <= 1.4:
            weight = 2 if name == ENTROPY else 1
            yield Evidence(weight=weight, text=f"{words} {change.before:.3g} → {change.after:.3g}")
    cut = context.change(NO_EOS)
    if cut is not None and cut.is_clear and abs(cut.after - cut.before) > 0.15:
        yield Evidence(weight=1, text=f"share of completions that don't end {cut.before:.2f} → {cut.after:.2f}")


def _same_completions(context: IncidentContext) -> str:
    """How completions stayed as they were; "" where that can't be seen, or they did not."""
    said = []
    for name, words in ((SEQ_LEN, "length"), (N_SEQS, "number"), (ENTROPY, "entropy"), (NO_EOS, "cut share")):
        change = context.change(name)
        if change is None:
            continue
        if change.is_clear and not 0.8 <= change.ratio <= 1.25:
            return ""
        said.append(f"{words} {change.before:.3g} → {change.after:.3g}")
    return ", ".join(said)
