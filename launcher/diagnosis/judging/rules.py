"""The table of rules: what speaks for and against each cause, how much, and what to change where it is the cause.

A rule is a weight and a predicate with its parameters. The predicate looks at the lines around the onset, which are
known by their patterns (`log_patterns.KINDS`), or at the figures before and after it, and yields what it saw as a
sentence. The weights are rough log-odds: 3 for what hardly happens otherwise, 1 for a hint. The tables, RULES and
REMEDIES, are at the end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Concatenate, ParamSpec

import numpy as np

from launcher.base.wording import in_one_line
from launcher.checkpoints.onset import Fall, Shape
from launcher.diagnosis.judging.incident_context import Change, IncidentContext
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
"""A server that makes no tokens for less may wait for the trainer."""
OF_THE_TRAINER = (Kind.TRAINER_FAILED, Kind.KILLED, Kind.KILLED_FOR_MEMORY)
NO_MEMORY = (Kind.OUT_OF_MEMORY, Kind.KILLED_FOR_MEMORY)
NO_REWARD = (Kind.REWARD_TIMEOUT, Kind.REWARD_ERROR)
BROKEN = (Kind.REFUSED, Kind.LOST, Kind.SERVER_EXITED, Kind.SERVER_EXCEPTION)
DEFAULT_TIMEOUT_S = 3600.0
SHORTER_TIMEOUT_S = 600


class Guess(enum.StrEnum):
    """What may have been the cause."""

    SERVER_CRASH = "server crash"
    SERVER_HANG = "server hang"
    OUT_OF_MEMORY = "out of memory"
    DEGRADATION = "model degradation"
    REWARD_FUNCTION = "reward function"
    TRAINER_CRASH = "trainer crash"


P = ParamSpec("P")
Seen = tuple[str, Sequence[LogEvent]]
"""What a predicate saw, as a sentence, and the lines that it comes from: none where it is of figures."""
Rule = tuple[int, Callable[[IncidentContext], Iterator[Seen]]]
"""What is seen counts this weight for its cause, or against it."""


def rule(
    weight: int, see: Callable[Concatenate[IncidentContext, P], Iterator[Seen]], *given: P.args, **options: P.kwargs
) -> Rule:
    return weight, lambda context: see(context, *given, **options)


# ── predicates of lines ──


def logged(
    context: IncidentContext, text: str, *kinds: Kind, unless: Sequence[Kind] = (), is_new: bool = False
) -> Iterator[Seen]:
    """Lines of these kinds around the onset. The text may have {times}, the first {line}, and an exit's {code}.
    `unless`: lines that explain them. `is_new`: there were none before."""
    events = context.near(*kinds)
    if events and not context.near(*unless) and not (is_new and context.earlier(*kinds)):
        exit_code = events[0].facts.get("exit_code")
        code = "" if exit_code is None else f" with exit code {exit_code}"
        yield text.format(times=_times(events), line=line_of(events[0]), code=code), events


def logged_with_a_fall(context: IncidentContext, text: str, *kinds: Kind) -> Iterator[Seen]:
    if context.found is not None:
        yield from logged(context, text, *kinds)


def found_by_the_run(context: IncidentContext, *causes: str) -> Iterator[Seen]:
    """What the run itself found while it was running."""
    own = [event for event in context.near(Kind.INCIDENT) if event.facts.get("cause") in causes]
    if own:
        yield f"the run itself found {own[0].facts.get('cause')}: {own[0].facts.get('reason')}", own


def refused(context: IncidentContext, *, far_more: bool) -> Iterator[Seen]:
    """`far_more`: in each step than before."""
    events, earlier = context.near(Kind.REFUSED), context.earlier(Kind.REFUSED)
    if events and far_more is (_mean_count(events) > 3 * _mean_count(earlier)):
        before = f"{_count(earlier)} times before" if earlier else "never before"
        since = f" from step {events[0].after_step + 1} on" if events[0].after_step is not None else ""
        yield f"{_times(events)} a connection was refused{since}, {before}", events


def nothing_broke(context: IncidentContext) -> Iterator[Seen]:
    if context.has_log(Role.TRAINER) and not context.near(*BROKEN) and not context.unplaced(*BROKEN):
        yield "no refused or broken connection around the onset", ()


def rewards_timed_out(context: IncidentContext) -> Iterator[Seen]:
    late = context.near(Kind.REWARD_TIMEOUT)
    if _count(late) > 3 * _mean_count(context.earlier(Kind.REWARD_TIMEOUT)):
        yield f"{_times(late)} a reward timed out and counted as 0", late


def line_of(event: LogEvent) -> str:
    return in_one_line(without_head(str(event.facts.get("line") or event.text)), longest=160)


def _count(events: Sequence[LogEvent]) -> int:
    return sum(event.count for event in events)


def _mean_count(events: Sequence[LogEvent]) -> float:
    return _count(events) / len(events) if events else 0.0


def _times(events: Sequence[LogEvent]) -> str:
    return "once" if (count := _count(events)) == 1 else f"{count:,} times"


# ── predicates of a server's tokens ──


def paused(context: IncidentContext) -> Iterator[Seen]:
    """The server made no tokens while the trainer waited for some."""
    limit = _longest_usual_pause(context)
    pauses = [event for event in context.near(Kind.NO_TOKENS) if not _is_last(event) and event.seconds >= limit]
    if pauses:
        longest = max(pauses, key=lambda event: event.seconds)
        yield f"a server made no tokens for {say_duration(longest.seconds)}", [longest]


def made_its_last_tokens(context: IncidentContext) -> Iterator[Seen]:
    """Until the trainer's log ends, or its last step was done, or the trainer itself failed."""
    written = (s for s in context.contents.sources if s.role not in (Role.SERVER, Role.KERNEL))
    end = max((s.last_time for s in written if s.last_time is not None), default=-np.inf)
    ends = [(end, "trainer's log ends")]
    ends += [(h.time, "trainer ended") for h in context.near(*OF_THE_TRAINER) if h.time and h.role is not Role.SERVER]
    for last in _last_tokens(context):
        if last.time is None or context.until is None or last.time > context.until:
            continue
        time, what = min((one for one in ends if one[0] > last.time), default=(last.time, ""))
        if time - last.time >= _longest_usual_pause(context):
            text = f"a server made its last tokens {say_duration(time - last.time)} before the {what}"
            yield text, [last]


def still_generating(context: IncidentContext) -> Iterator[Seen]:
    """A server that makes tokens long after the onset neither hangs nor is gone."""
    lasts = _last_tokens(context)
    if context.found is None or context.until is None or context.near(Kind.SERVER_READY, Kind.SERVER_LAUNCHED):
        return
    if max((event.time for event in lasts if event.time is not None), default=0.0) <= context.until:
        return
    if not any(event.seconds >= PAUSE_S for event in context.near(Kind.NO_TOKENS) if not _is_last(event)):
        yield "the servers continued to make tokens after the onset", lasts


def raised_without_a_silence(context: IncidentContext) -> Iterator[Seen]:
    """Neither had a server made no tokens for long by then, nor had its watchdog fired."""
    raised = context.near(Kind.SERVER_EXCEPTION)
    if raised and not _was_silent_at(context, raised[0].time):
        yield "an exception ended it: what is silent after that does not hang", raised


def _was_silent_at(context: IncidentContext, at: float | None) -> bool:
    if at is None:
        return False
    limit = _longest_usual_pause(context)
    fired = any(event.time is not None and event.time <= at for event in context.near(Kind.SERVER_WATCHDOG))
    return fired or any(
        event.time is not None and event.last_time is not None and event.time + limit <= at <= event.last_time
        for event in context.contents.log_events
        if event.kind is Kind.NO_TOKENS
    )


def _longest_usual_pause(context: IncidentContext) -> float:
    usual = [event.seconds for event in context.earlier(Kind.NO_TOKENS) if not _is_last(event)]
    return max(PAUSE_S, 5 * float(np.median(usual)) if usual else 0.0)


def _last_tokens(context: IncidentContext) -> list[LogEvent]:
    return [event for event in context.contents.log_events if event.kind is Kind.NO_TOKENS and _is_last(event)]


def _is_last(event: LogEvent) -> bool:
    return event.facts.get("is_last") is True


# ── predicates of memory ──


def memory_ran_out(context: IncidentContext) -> Iterator[Seen]:
    if ran_out := context.near(Kind.OUT_OF_MEMORY):
        yield f"{where_memory_ran_out(context)}: {line_of(ran_out[0])}", ran_out


def kernel_killed(context: IncidentContext, *, is_logged: bool, has_name: bool | None = None) -> Iterator[Seen]:
    """`is_logged`: a log mentions memory too. `has_name`: the kernel's line shows whose process it was."""
    killed = context.near(Kind.KILLED_FOR_MEMORY)
    if not killed or is_logged is not bool(context.near(Kind.OUT_OF_MEMORY)):
        return
    if has_name in (None, killed[0].role in (Role.SERVER, Role.TRAINER)):
        yield f"the kernel killed {_killed_process(killed[0])}: {line_of(killed[0])}", killed


def memory_is_not_mentioned(context: IncidentContext) -> Iterator[Seen]:
    has_log = any(source.what == "log" for source in context.contents.sources)
    if has_log and not context.near(*NO_MEMORY) and not context.unplaced(*NO_MEMORY):
        yield "no log mentions it around the onset", ()


def server_ran_out_of_memory(context: IncidentContext) -> Iterator[Seen]:
    """A server that ran out of memory crashes or hangs for that reason: the remedy is memory's."""
    if ran_out := [event for event in context.near(*NO_MEMORY) if place_of(event)[0] == "server"]:
        yield "a server ran out of memory: what else it did came of that", ran_out


def trainer_ran_out_of_memory(context: IncidentContext) -> Iterator[Seen]:
    if context.near(Kind.TRAINER_FAILED, Kind.KILLED) and context.near(*NO_MEMORY, role=Role.TRAINER):
        yield "it ran out of memory first", ()


def where_memory_ran_out(context: IncidentContext) -> str:
    """`server, at start-up`; "" where it did not."""
    if ran_out := context.near(Kind.OUT_OF_MEMORY):
        who, phase = place_of(ran_out[0])
        return {"": who, "startup": f"{who}, at start-up"}.get(phase, f"{who}, in {phase}")
    killed = context.near(Kind.KILLED_FOR_MEMORY)
    return f"the kernel killed {_killed_process(killed[0])}" if killed else ""


def _killed_process(event: LogEvent) -> str:
    """`sglang::schedul (pid 4242)`"""
    name, pid = str(event.facts.get("process") or "a process"), event.facts.get("pid")
    whose = "" if event.role is Role.UNKNOWN else f", of the {event.role}"
    return f"{name}{'' if pid is None else f' (pid {pid})'}{whose}"


# ── predicates of figures ──


def figure(
    context: IncidentContext, text: str, name: str, *, at_least: float = -inf, below: float | None = None
) -> Iterator[Seen]:
    """A figure that clearly changed, to this part of what it was. The text may have the values {before} and {after}."""
    change = context.change(name)
    if change is not None and change.is_clear and at_least <= change.ratio and (below is None or change.ratio < below):
        yield _of_change(text, change)


def rollouts_take_no_longer(context: IncidentContext) -> Iterator[Seen]:
    change = context.change(ROLLOUT_S)
    if change is not None and change.ratio < 1.5:
        yield _of_change("rollouts take no longer ({before:.3g} → {after:.3g} s a step)", change)


def hardly_a_token_came(context: IncidentContext) -> Iterator[Seen]:
    """With rollouts that failed fast."""
    if any(figure(context, FAILED_FAST, ROLLOUT_S, below=FAST)):
        yield from figure(context, FEW_TOKENS, SEQ_LEN, below=FAST)


def updates_fail(context: IncidentContext) -> Iterator[Seen]:
    change = context.change(UPDATED)
    if change is not None and change.before > 0.5 > change.after:
        yield "updates no longer succeed (update_successful)", ()


def moved(context: IncidentContext, words: str, name: str) -> Iterator[Seen]:
    """A figure of the completions. Where requests failed it says nothing about the policy."""
    change = context.change(name)
    if change is not None and change.is_clear and not 0.7 <= change.ratio <= 1.4 and not context.near(*FAILED):
        yield _of_change(f"{words} {{before:.3g}} → {{after:.3g}}", change)


def ends_moved(context: IncidentContext) -> Iterator[Seen]:
    cut = context.change(NO_EOS)
    if cut is not None and cut.is_clear and abs(cut.after - cut.before) > 0.15 and not context.near(*FAILED):
        yield _of_change("share of completions that don't end {before:.2f} → {after:.2f}", cut)


def completions_changed(context: IncidentContext) -> Iterator[Seen]:
    changes = chain(moved(context, "entropy", ENTROPY), moved(context, LENGTH, SEQ_LEN), ends_moved(context))
    if first := next(changes, None):
        yield f"the completions changed too: {first[0]}", ()


def dropped_with_the_same_completions(context: IncidentContext) -> Iterator[Seen]:
    if context.found is None or not is_sharp(context.found.fall) or context.near(*FAILED):
        return
    same = []
    for name, words in ((SEQ_LEN, "length"), (N_SEQS, "number"), (ENTROPY, "entropy"), (NO_EOS, "cut share")):
        change = context.change(name)
        if change is None:
            continue
        if change.is_clear and not 0.8 <= change.ratio <= 1.25:
            return
        same.append(f"{words} {change.before:.3g} → {change.after:.3g}")
    if same:
        yield f"the rewards dropped at once while completions stayed as they were: {', '.join(same)}", ()


def peaked(context: IncidentContext, words: str, name: str, factor: float) -> Iterator[Seen]:
    """A figure that was far above its usual value just before the fall."""
    peak = context.peak_before(name)
    if peak is not None and peak[1] > 0 and peak[0] > factor * peak[1] and not context.near(*FAILED):
        yield f"{words} {peak[0]:.3g} at step {peak[2]}, usually {peak[1]:.3g}", ()


def not_finite(context: IncidentContext, words: str, name: str) -> Iterator[Seen]:
    if context.found is None:
        return
    rows, onset, is_finite = context.found.rows, context.found.fall.onset, np.isfinite(context.series(name))
    begin = max(0, onset - 20)
    lost = np.flatnonzero(~is_finite[begin : onset + 3])
    if len(lost) and onset and is_finite[:onset].mean() > 0.9:
        step = int(context.contents.steps.steps[rows[begin + lost[0]]])
        yield f"the {words} was not finite at step {step}", ()


def no_rollout_finished(context: IncidentContext) -> Iterator[Seen]:
    is_missing = context.found is not None and context.found.fall.shape is Shape.MISSING
    if is_missing or context.has_vanished(ROLLOUT_REWARD):
        yield "from the onset on no rollout finished (no rollout/reward)", ()


def _of_change(text: str, change: Change) -> Seen:
    return text.format(before=change.before, after=change.after), ()


# ── predicates of the fall's shape ──


def fall(context: IncidentContext, text: str, *shapes: Shape) -> Iterator[Seen]:
    """The text may have over how many {steps} the rewards fell."""
    if context.found is not None and (found := context.found.fall).shape in shapes:
        yield text.format(steps=found.bottom - found.onset), ()


def was_0_at_once(context: IncidentContext) -> Iterator[Seen]:
    if context.found is not None and is_sharp(context.found.fall):
        yield from fall(context, "the rewards were exactly 0 from one step to the next", Shape.ZERO, Shape.MISSING)


def jumps_between_0_and_the_old_level(context: IncidentContext) -> Iterator[Seen]:
    if context.found is not None and context.found.fall.zeros > context.found.fall.steps / 3:
        yield from fall(context, "the rewards jump between 0 and the old level: the policy still can", Shape.SPIKES)


def did_not_fall(context: IncidentContext, *explained_by: Kind) -> Iterator[Seen]:
    """`explained_by`: lines that speak for the cause without a fall."""
    if context.found is None and not context.near(*explained_by):
        yield "the rewards did not fall", ()


def is_sharp(fall: Fall) -> bool:
    return fall.bottom - fall.onset < SHARP_STEPS


# ── for (weight > 0) and against each cause ──

LENGTH = "length of sequences"
NO_ANSWER = "{times} a request got no answer in time, never before"
FAILED_FAST = "rollouts failed fast: {before:.3g} s a step before, {after:.3g} s after"
FEW_TOKENS = "and hardly a token came: sequences of {before:.3g} → {after:.3g}"
THEY_WAIT = "rollouts take {after:.3g} s a step, {before:.3g} s before: they wait"
TOO_FEW_TOKENS = "rollouts took {after:.3g} s in place of {before:.3g}: too few tokens"
CONNECTIONS_FAILED = "connections failed at the same time"

RULES: Mapping[Guess, tuple[Rule, ...]] = {
    Guess.SERVER_CRASH: (
        rule(6, found_by_the_run, "server_crash", "server_corrupt"),
        rule(3, logged, "a server's process ended{code}", Kind.SERVER_EXITED),
        rule(3, logged, "an exception ended a server", Kind.SERVER_EXCEPTION),
        rule(3, refused, far_more=True),
        rule(1, refused, far_more=False),
        rule(1, logged, "{times} a connection broke, never before", Kind.LOST, is_new=True),
        rule(2, figure, FAILED_FAST, ROLLOUT_S, below=FAST),
        rule(3, hardly_a_token_came),
        rule(-6, server_ran_out_of_memory),
        rule(-3, still_generating),
        rule(-2, nothing_broke),
        rule(1, no_rollout_finished),
    ),
    Guess.SERVER_HANG: (
        rule(6, found_by_the_run, "server_hang"),
        rule(3, paused),
        rule(4, made_its_last_tokens),
        rule(3, logged, "its own watchdog fired", Kind.SERVER_WATCHDOG),
        rule(2, logged, "{times} its health check failed", Kind.SERVER_UNHEALTHY),
        rule(2, logged, NO_ANSWER, Kind.TIMEOUT, Kind.REQUEST_FAILED, unless=(Kind.REFUSED,), is_new=True),
        rule(2, figure, THEY_WAIT, ROLLOUT_S, at_least=4),
        rule(-1, rollouts_take_no_longer),
        rule(-2, logged, "connections are refused: a process that hangs still accepts them", Kind.REFUSED),
        rule(-2, logged, "the server's process ended", Kind.SERVER_EXITED),
        rule(-6, raised_without_a_silence),
        rule(-6, server_ran_out_of_memory),
        rule(-3, still_generating),
        rule(1, no_rollout_finished),
    ),
    Guess.OUT_OF_MEMORY: (
        rule(6, found_by_the_run, "server_oom", "trainer_oom"),
        rule(6, memory_ran_out),
        rule(6, kernel_killed, is_logged=False, has_name=True),
        rule(5, kernel_killed, is_logged=False, has_name=False),
        rule(2, kernel_killed, is_logged=True),
        rule(1, logged, "the kernel killed another program for memory: {line}", Kind.OTHER_KILLED),
        rule(-3, memory_is_not_mentioned),
    ),
    Guess.DEGRADATION: (
        rule(6, found_by_the_run, "reward_collapse", "nonfinite"),
        rule(-2, did_not_fall),
        rule(3, fall, "the rewards fell slowly, over {steps} steps", Shape.DECAY),
        rule(1, fall, "the rewards fell to a lower level, not to 0", Shape.PLATEAU),
        rule(-2, was_0_at_once),
        rule(-2, jumps_between_0_and_the_old_level),
        rule(3, not_finite, "loss", LOSS),
        rule(3, not_finite, "gradient norm", GRAD_NORM),
        rule(1, updates_fail),
        rule(2, peaked, "gradient norm", GRAD_NORM, 3.0),
        rule(2, peaked, "KL to the old policy", KL, 4.0),
        rule(2, moved, "entropy", ENTROPY),
        rule(1, moved, LENGTH, SEQ_LEN),
        rule(1, ends_moved),
        rule(-2, logged_with_a_fall, CONNECTIONS_FAILED, *FAILED),
        rule(-1, logged_with_a_fall, "rewards could not be computed at the same time", *NO_REWARD),
    ),
    Guess.REWARD_FUNCTION: (
        rule(6, found_by_the_run, "verifier_broken"),
        rule(3, rewards_timed_out),
        rule(3, logged, "{times} the reward function failed: {line}", Kind.REWARD_ERROR),
        rule(-2, did_not_fall, *NO_REWARD),
        rule(-5, figure, TOO_FEW_TOKENS, ROLLOUT_S, below=MUCH_FASTER),
        rule(-2, figure, TOO_FEW_TOKENS, ROLLOUT_S, at_least=MUCH_FASTER, below=FAST),
        rule(3, fall, "not one reward of the run was above 0", Shape.NEVER),
        rule(-1, fall, "the rewards fell slowly; a function breaks from one step to the next", Shape.DECAY),
        rule(3, dropped_with_the_same_completions),
        rule(-2, logged_with_a_fall, CONNECTIONS_FAILED, *FAILED),
        rule(-1, completions_changed),
    ),
    Guess.TRAINER_CRASH: (
        rule(6, found_by_the_run, "trainer_crash", "trainer_hang"),
        rule(3, logged, "the trainer failed: {line}", Kind.TRAINER_FAILED),
        rule(3, logged, "a process was ended by SIGKILL: {line}", Kind.KILLED, unless=(Kind.TRAINER_FAILED,)),
        rule(-2, trainer_ran_out_of_memory),
    ),
}


# ── what to change ──

Override = Callable[[Mapping[str, object]], str]
"""The setting that is known to help, as `key=value`, from the run's own; "" where there is none."""


def no_setting(_: Mapping[str, object]) -> str:
    return ""


def shorter_timeout(settings: Mapping[str, object]) -> str:
    timeout = settings.get("rollout.request_timeout", DEFAULT_TIMEOUT_S)
    is_longer = isinstance(timeout, int | float) and timeout > SHORTER_TIMEOUT_S
    return f"rollout.request_timeout={SHORTER_TIMEOUT_S}" if is_longer else ""


def half_the_rate(settings: Mapping[str, object]) -> str:
    rate = settings.get("actor.optimizer.lr")
    return f"actor.optimizer.lr={rate / 2:g}" if isinstance(rate, int | float) and rate > 0 else ""


REMEDIES: Mapping[Guess, tuple[str, Override]] = {
    Guess.SERVER_CRASH: (
        "no setting prevents every crash: run it where it is watched and restarted (this launcher "
        "does both by itself), and never count a failed rollout as reward 0. If it crashes again and again, "
        "go one rung down: a lower sglang.mem_fraction_static",
        no_setting,
    ),
    Guess.SERVER_HANG: (
        "let requests end sooner, so that a hang shows, and run the server where it is watched and restarted "
        "(this launcher does by itself); never count a failed rollout as reward 0. If it hangs again under load, a "
        "lower sglang.mem_fraction_static or rollout.max_concurrent_rollouts",
        shorter_timeout,
    ),
    Guess.DEGRADATION: (
        "resume from before the onset with smaller steps: half the learning rate; if it falls again, a KL term "
        "(actor.kl_loss_coef) or a narrower actor.eps_clip",
        half_the_rate,
    ),
    Guess.REWARD_FUNCTION: (
        "repair the reward function, and test it on known answers before resuming. One that is too "
        "slow: a longer reward.timeout, more reward.workers",
        no_setting,
    ),
    Guess.TRAINER_CRASH: (
        "read the trainer's own error above; resuming as it was repeats it if it is not chance",
        no_setting,
    ),
}
"""Of memory it depends on whose ran out: remedies.py."""
