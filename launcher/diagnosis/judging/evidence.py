"""Evidence for and against each cause, as sentences with their figures and the log line that they come from.

The weights are rough log-odds: 3 for what hardly happens otherwise, 1 for a hint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.base.wording import in_one_line
from launcher.checkpoints.onset import Shape
from launcher.diagnosis.judging.incident_context import IncidentContext
from launcher.diagnosis.reading.log_clock import say_duration
from launcher.diagnosis.reading.log_patterns import place_of, without_head
from launcher.diagnosis.reading.log_records import (
    ENTROPY,
    FAILED,
    GRAD_NORM,
    KL,
    LOSS,
    N_SEQS,
    NO_EOS,
    ROLLOUT_REWARD,
    ROLLOUT_S,
    SEQ_LEN,
    UPDATED,
    Kind,
    LogEvent,
    Role,
)

SHARP_STEPS = 3
"""A fall within fewer steps is a drop."""
FAST, MUCH_FASTER = 0.5, 0.2
"""Rollouts that take this part of their usual time were not generated."""
PAUSE_S = 120.0
OF_THE_TRAINER = (Kind.TRAINER_FAILED, Kind.KILLED, Kind.KILLED_FOR_MEMORY)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One piece of evidence for (weight > 0) or against a cause. `where`: file and line, where there is one. `time`:
    when it began, as LogEvent has it."""

    weight: int
    text: str
    where: str = ""
    time: float | None = None


def seen_in(events: Sequence[LogEvent], weight: int, text: str) -> Evidence:
    return Evidence(weight, text, events[0].where, min((e.time for e in events if e.time is not None), default=None))


def own_incidents(context: IncidentContext, *causes: str) -> Iterator[Evidence]:
    """What the run itself found while it was running."""
    own = [h for h in context.near(Kind.INCIDENT) if h.facts.get("cause") in causes]
    if own:
        yield seen_in(own, 6, f"the run itself found {own[0].facts.get('cause')}: {own[0].facts.get('reason')}")


def seconds_of(event: LogEvent) -> float:
    seconds = event.facts.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def _count(events: Sequence[LogEvent]) -> int:
    return sum(h.count for h in events)


def _mean_count(events: Sequence[LogEvent]) -> float:
    return _count(events) / len(events) if events else 0.0


def _times(events: Sequence[LogEvent]) -> str:
    return "once" if (count := _count(events)) == 1 else f"{count:,} times"


def line_of(event: LogEvent) -> str:
    return in_one_line(without_head(str(event.facts.get("line") or event.text)), longest=160)


# ── servers ──


def of_server_crash(context: IncidentContext) -> Iterator[Evidence]:
    yield from own_incidents(context, "server_crash", "server_corrupt")
    if exits := context.near(Kind.SERVER_EXITED):
        code = exits[0].facts.get("exit_code")
        yield seen_in(exits, 3, f"a server's process ended{'' if code is None else f' with exit code {code}'}")
    if raised := context.near(Kind.SERVER_EXCEPTION):
        yield seen_in(raised, 3, "an exception ended a server")
    yield from _refusals(context)
    if (lost := context.near(Kind.LOST)) and not context.earlier(Kind.LOST):
        yield seen_in(lost, 1, f"{_times(lost)} a connection broke, never before")
    change = context.change(ROLLOUT_S)
    if change is not None and change.is_clear and change.ratio < FAST:
        yield Evidence(2, f"rollouts failed fast: {change.before:.3g} s a step before, {change.after:.3g} s after")
        length = context.change(SEQ_LEN)
        if length is not None and length.is_clear and length.ratio < FAST:
            yield Evidence(3, f"and hardly a token came: sequences of {length.before:.3g} → {length.after:.3g}")
    yield from _explained_by_memory(context)
    yield from _still_generating(context)
    kinds = (Kind.REFUSED, Kind.LOST, Kind.SERVER_EXITED, Kind.SERVER_EXCEPTION)
    if context.has_log(Role.TRAINER) and not context.near(*kinds) and not context.unplaced(*kinds):
        yield Evidence(-2, "no refused or broken connection around the onset")
    yield from _no_rollout(context)


def of_server_hang(context: IncidentContext) -> Iterator[Evidence]:
    yield from own_incidents(context, "server_hang")
    yield from _pauses(context)
    if fired := context.near(Kind.SERVER_WATCHDOG):
        yield seen_in(fired, 3, "its own watchdog fired")
    if unwell := context.near(Kind.SERVER_UNHEALTHY):
        yield seen_in(unwell, 2, f"{_times(unwell)} its health check failed")
    refused, slow = context.near(Kind.REFUSED), context.near(Kind.TIMEOUT, Kind.REQUEST_FAILED)
    if slow and not refused and not context.earlier(Kind.TIMEOUT, Kind.REQUEST_FAILED):
        yield seen_in(slow, 2, f"{_times(slow)} a request got no answer in time, never before")
    change = context.change(ROLLOUT_S)
    if change is not None and change.is_clear and change.ratio >= 4:
        yield Evidence(2, f"rollouts take {change.after:.3g} s a step, {change.before:.3g} s before: they wait")
    elif change is not None and change.ratio < 1.5:
        yield Evidence(-1, f"rollouts take no longer ({change.before:.3g} → {change.after:.3g} s a step)")
    if refused:
        yield seen_in(refused, -2, "connections are refused: a process that hangs still accepts them")
    if exits := context.near(Kind.SERVER_EXITED):
        yield seen_in(exits, -2, "the server's process ended")
    if (raised := context.near(Kind.SERVER_EXCEPTION)) and not _was_silent_before(context, raised[0]):
        yield seen_in(raised, -6, "an exception ended it: what is silent after that does not hang")
    yield from _explained_by_memory(context)
    yield from _still_generating(context)
    yield from _no_rollout(context)


def _explained_by_memory(context: IncidentContext) -> Iterator[Evidence]:
    """A server that ran out of memory crashes or hangs for that reason: the remedy is memory's."""
    ended = context.near(Kind.OUT_OF_MEMORY, Kind.KILLED_FOR_MEMORY)
    if ran_out := [h for h in ended if place_of(h)[0] == "server"]:
        yield seen_in(ran_out, -6, "a server ran out of memory: what else it did came of that")


def _refusals(context: IncidentContext) -> Iterator[Evidence]:
    refused, earlier = context.near(Kind.REFUSED), context.earlier(Kind.REFUSED)
    if refused:
        before = f"{_count(earlier)} times before" if earlier else "never before"
        since = f" from step {refused[0].after_step + 1} on" if refused[0].after_step is not None else ""
        weight = 3 if _mean_count(refused) > 3 * _mean_count(earlier) else 1
        yield seen_in(refused, weight, f"{_times(refused)} a connection was refused{since}, {before}")


def _pauses(context: IncidentContext) -> Iterator[Evidence]:
    """The server made no tokens while the trainer waited for some."""
    limit = _longest_usual_pause(context)
    pauses = [h for h in context.near(Kind.NO_TOKENS) if not h.facts.get("is_last") and seconds_of(h) >= limit]
    if pauses:
        longest = max(pauses, key=seconds_of)
        yield seen_in([longest], 3, f"a server made no tokens for {say_duration(seconds_of(longest))}")
    # until the trainer's log ends, or its last step was done, or the trainer itself failed
    written = (s for s in context.contents.sources if s.role not in (Role.SERVER, Role.KERNEL))
    end = max((s.last_time for s in written if s.last_time is not None), default=-np.inf)
    ends = [(end, "trainer's log ends")]
    ends += [(h.time, "trainer ended") for h in context.near(*OF_THE_TRAINER) if h.time and h.role is not Role.SERVER]
    for last in _last_tokens(context):
        if last.time is None or context.until is None or last.time > context.until:
            continue
        time, what = min((one for one in ends if one[0] > last.time), default=(last.time, ""))
        if time - last.time >= limit:
            text = f"a server made its last tokens {say_duration(time - last.time)} before the {what}"
            yield seen_in([last], 4, text)


def _longest_usual_pause(context: IncidentContext) -> float:
    """A server that makes no tokens for less may wait for the trainer."""
    usual = [seconds_of(h) for h in context.earlier(Kind.NO_TOKENS) if not h.facts.get("is_last")]
    return max(PAUSE_S, 5 * float(np.median(usual)) if usual else 0.0)


def _was_silent_before(context: IncidentContext, event: LogEvent) -> bool:
    """Had a server made no tokens for long when this happened, or had its watchdog fired?"""
    if event.time is None:
        return False
    fired = any(h.time is not None and h.time <= event.time for h in context.near(Kind.SERVER_WATCHDOG))
    limit = _longest_usual_pause(context)
    return fired or any(
        h.time is not None and h.last_time is not None and h.time + limit <= event.time <= h.last_time
        for h in context.contents.log_events
        if h.kind is Kind.NO_TOKENS
    )


def _last_tokens(context: IncidentContext) -> list[LogEvent]:
    return [h for h in context.contents.log_events if h.kind is Kind.NO_TOKENS and h.facts.get("is_last")]


def _still_generating(context: IncidentContext) -> Iterator[Evidence]:
    """A server that makes tokens long after the onset neither hangs nor is gone."""
    lasts = _last_tokens(context)
    if context.found is None or context.until is None or context.near(Kind.SERVER_READY, Kind.SERVER_LAUNCHED):
        return
    if max((h.time for h in lasts if h.time is not None), default=0.0) <= context.until:
        return
    if not any(seconds_of(h) >= PAUSE_S for h in context.near(Kind.NO_TOKENS) if not h.facts.get("is_last")):
        yield seen_in(lasts, -3, "the servers continued to make tokens after the onset")


def _no_rollout(context: IncidentContext) -> Iterator[Evidence]:
    is_missing = context.found is not None and context.found.fall.shape is Shape.MISSING
    if is_missing or context.has_vanished(ROLLOUT_REWARD):
        yield Evidence(1, "from the onset on no rollout finished (no rollout/reward)")


# ── the policy and the reward function ──


def of_degradation(context: IncidentContext) -> Iterator[Evidence]:
    yield from own_incidents(context, "reward_collapse", "nonfinite")
    if context.found is None:
        yield Evidence(-2, "the rewards did not fall")
        return
    yield from _shape_of_degradation(context)
    yield from _not_finite(context)
    failed = context.near(*FAILED)
    for name, words, factor in ((GRAD_NORM, "gradient norm", 3.0), (KL, "KL to the old policy", 4.0)):
        peak = context.peak_before(name)
        if peak is not None and peak[1] > 0 and peak[0] > factor * peak[1] and not failed:
            yield Evidence(2, f"{words} {peak[0]:.3g} at step {peak[2]}, usually {peak[1]:.3g}")
    yield from _changed_completions(context)
    yield from _failed_connections(context)
    if context.near(Kind.REWARD_TIMEOUT, Kind.REWARD_ERROR):
        yield Evidence(-1, "rewards could not be computed at the same time")


def of_reward_function(context: IncidentContext) -> Iterator[Evidence]:
    yield from own_incidents(context, "verifier_broken")
    late, raised = context.near(Kind.REWARD_TIMEOUT), context.near(Kind.REWARD_ERROR)
    if late and _count(late) > 3 * _mean_count(context.earlier(Kind.REWARD_TIMEOUT)):
        yield seen_in(late, 3, f"{_times(late)} a reward timed out and counted as 0")
    if raised:
        yield seen_in(raised, 3, f"{_times(raised)} the reward function failed: {line_of(raised[0])}")
    if context.found is None:
        if not late and not raised:
            yield Evidence(-2, "the rewards did not fall")
        return
    fall, rollout = context.found.fall, context.change(ROLLOUT_S)
    if rollout is not None and rollout.is_clear and rollout.ratio < FAST:
        weight = -5 if rollout.ratio < MUCH_FASTER else -2
        yield Evidence(weight, f"rollouts took {rollout.after:.3g} s in place of {rollout.before:.3g}: too few tokens")
    if fall.shape is Shape.NEVER:
        yield Evidence(3, "not one reward of the run was above 0")
    elif fall.shape is Shape.DECAY:
        yield Evidence(-1, "the rewards fell slowly; a function breaks from one step to the next")
    same = _same_completions(context)
    if same and fall.bottom - fall.onset < SHARP_STEPS and not context.near(*FAILED):
        yield Evidence(3, f"the rewards dropped at once while completions stayed as they were: {same}")
    yield from _failed_connections(context)
    if changed := [one.text for one in _changed_completions(context)]:
        yield Evidence(-1, f"the completions changed too: {changed[0]}")


def _failed_connections(context: IncidentContext) -> Iterator[Evidence]:
    if failed := context.near(*FAILED):
        yield seen_in(failed, -2, "connections failed at the same time")


def _shape_of_degradation(context: IncidentContext) -> Iterator[Evidence]:
    assert context.found is not None
    fall = context.found.fall
    slope = fall.bottom - fall.onset
    if fall.shape is Shape.DECAY:
        yield Evidence(3, f"the rewards fell slowly, over {slope} steps")
    elif fall.shape is Shape.PLATEAU:
        yield Evidence(1, "the rewards fell to a lower level, not to 0")
    elif fall.shape in (Shape.ZERO, Shape.MISSING) and slope < SHARP_STEPS:
        yield Evidence(-2, "the rewards were exactly 0 from one step to the next")
    elif fall.shape is Shape.SPIKES and fall.zeros > fall.steps / 3:
        yield Evidence(-2, "the rewards jump between 0 and the old level: the policy still can")


def _not_finite(context: IncidentContext) -> Iterator[Evidence]:
    assert context.found is not None
    rows, onset = context.found.rows, context.found.fall.onset
    for name, words in ((LOSS, "loss"), (GRAD_NORM, "gradient norm")):
        is_finite = np.isfinite(context.series(name))
        begin = max(0, onset - 20)
        lost = np.flatnonzero(~is_finite[begin : onset + 3])
        if len(lost) and onset and is_finite[:onset].mean() > 0.9:
            step = int(context.contents.steps.steps[rows[begin + lost[0]]])
            yield Evidence(3, f"the {words} was not finite at step {step}")
    change = context.change(UPDATED)
    if change is not None and change.before > 0.5 > change.after:
        yield Evidence(1, "updates no longer succeed (update_successful)")


def _changed_completions(context: IncidentContext) -> Iterator[Evidence]:
    """Entropy, lengths and cut ends, where they moved with the rewards."""
    if context.near(*FAILED):
        return
    for name, words, weight in ((ENTROPY, "entropy", 2), (SEQ_LEN, "length of sequences", 1)):
        change = context.change(name)
        if change is not None and change.is_clear and not 0.7 <= change.ratio <= 1.4:
            yield Evidence(weight, f"{words} {change.before:.3g} → {change.after:.3g}")
    cut = context.change(NO_EOS)
    if cut is not None and cut.is_clear and abs(cut.after - cut.before) > 0.15:
        yield Evidence(1, f"share of completions that don't end {cut.before:.2f} → {cut.after:.2f}")


def _same_completions(context: IncidentContext) -> str:
    """How completions stayed as they were; "" where that can't be seen, or they did not."""
    same = []
    for name, words in ((SEQ_LEN, "length"), (N_SEQS, "number"), (ENTROPY, "entropy"), (NO_EOS, "cut share")):
        change = context.change(name)
        if change is None:
            continue
        if change.is_clear and not 0.8 <= change.ratio <= 1.25:
            return ""
        same.append(f"{words} {change.before:.3g} → {change.after:.3g}")
    return ", ".join(same)
