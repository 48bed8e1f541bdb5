"""Makes the verdict: what happened to the run, since when, why, and what to do. All output is made from it."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.base.errors import HINT
from launcher.base.wording import in_one_line, some_of
from launcher.checkpoints.onset import Shape, usual_range
from launcher.diagnosis.judging.causes import Causes, weigh
from launcher.diagnosis.judging.incident_context import IncidentContext, context_of
from launcher.diagnosis.judging.incident_timeline import TimelineMoment, timeline_of
from launcher.diagnosis.judging.remedies import Remedy, remedy_of
from launcher.diagnosis.judging.restore_advice import RestoreAdvice, advise_restore
from launcher.diagnosis.judging.rules import Guess, is_sharp
from launcher.diagnosis.judging.seen_enough import Stall, longest_stall, losses_of, not_seen
from launcher.diagnosis.judging.step_history import FoundFall, Pass, evidence_of, falls_of, main_fall, passes_of
from launcher.diagnosis.reading.log_clock import say_duration
from launcher.diagnosis.reading.log_patterns import place_of, ran_out_of
from launcher.diagnosis.reading.log_records import FAILED, REWARD, Contents, Kind, LogEvent
from launcher.diagnosis.reading.run_folders import RunFolders
from launcher.diagnosis.reading.time_zones import say_time

FATAL = (
    Kind.OUT_OF_MEMORY,
    Kind.SERVER_EXITED,
    Kind.SERVER_EXCEPTION,
    Kind.SERVER_WATCHDOG,
    Kind.TRAINER_FAILED,
    Kind.KILLED_FOR_MEMORY,
    Kind.KILLED,
)
"""What ends a run where no step comes after it."""
OFTEN = 5
"""So many failed requests, with no step after them, keep the run from its next step."""
SURVIVED = (*FATAL, *FAILED, Kind.INCIDENT, Kind.BATCH_REJECTED)
LONGEST_REASON = 160


class RunCondition(enum.StrEnum):
    """FELL: the rewards fell and are down. RECOVERED: they fell, and came back or were undone. STOPPED: the run
    ended by a failure. STALLED: it made no step for long, also where it continued later. UNCLEAR: no failure was found,
    and too little was seen to say that there is none. FINE: enough was seen, and no failure that
    lasted."""

    FELL = "FELL"
    RECOVERED = "RECOVERED"
    STOPPED = "STOPPED"
    STALLED = "STALLED"
    UNCLEAR = "UNCLEAR"
    FINE = "FINE"


NO_FAILURE = (RunCondition.FINE, RunCondition.UNCLEAR)
UNEXPLAINED = (*NO_FAILURE, RunCondition.STALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """Global steps, from 0. `step`: the first bad one; it lies within `earliest` and `latest`."""

    step: int
    earliest: int
    latest: int
    time: str
    before: float
    after: float
    shape: Shape
    bad_steps: int
    stands: bool
    is_over: bool
    is_sharp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`onset` and `causes`: None where it is FINE. `others`: further falls. `notes`: what else is worth
    knowing. `losses`: what the run lost, as text."""

    condition: RunCondition
    headline: str
    onset: Onset | None
    others: tuple[Onset, ...]
    causes: Causes | None
    remedy: Remedy | None
    restore_advice: RestoreAdvice | None
    timeline: tuple[TimelineMoment, ...]
    notes: tuple[str, ...]
    losses: tuple[str, ...]
    contents: Contents

    @property
    def is_failure(self) -> bool:
        return self.condition not in NO_FAILURE


def diagnose(contents: Contents, folders: RunFolders) -> Diagnosis:
    """The verdict on what was read. Uses nothing but its arguments."""
    passes = passes_of(contents.steps)
    falls = falls_of(contents.steps, passes)
    main = main_fall(falls)
    health = evidence_of(contents, falls, passes) if folders.health is None else folders.health
    stall, unseen = longest_stall(contents), list(not_seen(contents, health))
    condition = _condition(contents, main, stall, unseen)
    context = context_of(contents, main)
    causes = weigh(context) if condition not in UNEXPLAINED else None
    guess = causes.first.guess if causes and causes.first else None
    is_of_fall = condition in (RunCondition.FELL, RunCondition.RECOVERED)
    onset = _onset(contents, main) if main is not None and is_of_fall else None
    remedy = _remedy(guess, contents, context, folders) if causes else None
    is_taken_back = onset is not None and not onset.stands and condition is RunCondition.RECOVERED
    advice = None if remedy is None or is_taken_back else advise_restore(folders, health, remedy.overrides)
    return Diagnosis(
        condition=condition,
        headline=_headline(condition, contents, onset, causes, stall, unseen),
        onset=onset,
        others=tuple(_onset(contents, one) for one in falls if one is not main or onset is None),
        causes=causes,
        remedy=remedy,
        restore_advice=advice,
        timeline=tuple(timeline_of(contents, main if onset is not None else None)),
        notes=tuple(_notes(condition, contents, passes, onset)),
        losses=tuple(losses_of(contents)),
        contents=contents,
    )


def _condition(contents: Contents, main: FoundFall | None, stall: Stall | None, unseen: Sequence[str]) -> RunCondition:
    if main is not None and main.is_current and not main.fall.is_over:
        return RunCondition.FELL
    if _has_stopped(contents):
        return RunCondition.STOPPED
    if main is not None and (not main.is_current or main.fall.zeros >= 5):
        return RunCondition.RECOVERED
    if stall is not None:
        return RunCondition.STALLED
    return RunCondition.UNCLEAR if unseen else RunCondition.FINE


def _has_stopped(contents: Contents) -> bool:
    """Did something end the run, so that no step came after it? A run that did all its steps may end as it likes."""
    if endings := _endings(contents):
        return endings[-1].facts.get("event") == "run.errored"
    steps = contents.steps
    if contents.total_steps and steps.last_step == contents.total_steps - 1:
        return False
    last_time = float(steps.times[-1]) if len(steps) else -math.inf
    ending = [h for h in contents.log_events if h.kind in (*FATAL, *FAILED)]
    after = [h for h in ending if not len(steps) or _is_after(h, steps.last_step, last_time)]
    fatal = [h for h in after if h.kind in FATAL]
    if not fatal:
        return sum(h.count for h in after) >= OFTEN
    last = fatal[-1].time
    ready = [h.time for h in contents.log_events if h.kind is Kind.SERVER_READY and h.time is not None]
    has_started_in_the_end = bool(ready) and last is not None and max(ready) > last
    return bool(len(steps)) or not has_started_in_the_end


def _is_after(event: LogEvent, last_step: int | None, last_time: float) -> bool:
    """Did it happen after the last step? By the step where its log counts them, else by time."""
    if event.after_step is not None:
        return event.after_step == last_step
    return event.time is not None and event.time > last_time


def _onset(contents: Contents, found: FoundFall) -> Onset:
    numbers, times, rows, fall = contents.steps.steps, contents.steps.times, found.rows, found.fall
    time = float(times[rows[fall.onset]])
    return Onset(
        step=int(numbers[rows[fall.onset]]),
        earliest=int(numbers[rows[fall.earliest]]),
        latest=int(numbers[rows[fall.latest]]),
        time=say_time(time, contents.shown) if np.isfinite(time) else "",
        before=fall.before,
        after=fall.after,
        shape=fall.shape,
        bad_steps=fall.steps,
        stands=found.is_current,
        is_over=fall.is_over,
        is_sharp=is_sharp(fall),
    )


def _remedy(guess: Guess | None, contents: Contents, context: IncidentContext, folders: RunFolders) -> Remedy:
    if guess is None and (hint := _own_reason(contents).partition(HINT)[2]):
        return Remedy(change=f"what the run itself said: {in_one_line(hint, longest=LONGEST_REASON)}")
    ran_out = next(iter(context.near(Kind.OUT_OF_MEMORY) or context.near(Kind.KILLED_FOR_MEMORY)), None)
    if ran_out is None:
        return remedy_of(guess, folders.settings)
    return remedy_of(guess, folders.settings, ran_out=ran_out_of(ran_out), place=place_of(ran_out))


def _headline(
    condition: RunCondition,
    contents: Contents,
    onset: Onset | None,
    causes: Causes | None,
    stall: Stall | None,
    unseen: Sequence[str],
) -> str:
    why = _why(causes)
    if onset is not None:
        fell = f"{onset.shape}: {onset.before:.3g} → {onset.after:.3g}"
        if onset.shape is Shape.NEVER:
            where = "the first step" if onset.step == 0 else f"the first step seen, {onset.step}: the fall is earlier"
            return f"the rewards were 0 from {where}. {why}"
        if condition is RunCondition.FELL:
            return f"since global step {onset.step} the rewards are down, {fell}, {onset.bad_steps} steps. {why}"
        how = "and came back" if onset.stands else "and a recovery took it back"
        return f"at global step {onset.step} the rewards fell, {fell}, {how}. {why}"
    if condition is RunCondition.STOPPED:
        last = contents.steps.last_step
        after = "before its first step" if last is None else f"after global step {last}"
        own = in_one_line(_own_reason(contents).partition(HINT)[0], longest=LONGEST_REASON)
        return f"the run stopped {after}{f' ({own})' if own else ''}. {why}"
    if condition is RunCondition.STALLED and stall is not None:
        later = "it continued later" if stall.is_over else "and none has followed"
        usual = f"one usually takes {say_duration(stall.usual_s)}"
        said = f". The run says: {in_one_line(stall.said, longest=LONGEST_REASON)}" if stall.said else ""
        return f"no step for {say_duration(stall.seconds)} after global step {stall.after_step}, {usual}; {later}{said}"
    has_survived = any(event.kind in SURVIVED for event in contents.log_events)
    found = f"no failure {'that lasted' if has_survived else 'found'} in {_say_steps(contents)}"
    return f"{'; '.join(unseen)}. {found[0].upper()}{found[1:]}" if condition is RunCondition.UNCLEAR else found


def _endings(contents: Contents) -> list[LogEvent]:
    """Of the last attempt: an earlier one's end is over where another began."""

    def attempt(event: LogEvent) -> int:
        given = event.facts.get("attempt")
        return given if isinstance(given, int) else 0

    last = max((attempt(event) for event in contents.log_events if event.kind is Kind.RECOVER_RUN), default=0)
    return [event for event in contents.log_events if event.kind is Kind.RUN_ENDED and attempt(event) >= last]


def _own_reason(contents: Contents) -> str:
    """What the run itself gave as its reason, last; "" where it gave none."""
    endings = [str(event.facts.get("reason") or "") for event in _endings(contents)]
    return next((reason for reason in reversed(endings) if reason), "")


def _why(causes: Causes | None) -> str:
    if causes is None or causes.first is None:
        return "Cause: not to be seen in what was given"
    first = causes.first
    name = f"{first.guess} ({first.where})" if first.where else str(first.guess)
    if causes.is_sure:
        return f"Cause: {name}"
    return f"Cause: not certain, {name} is likelier than {causes.ranked[1].guess}"


def _say_steps(contents: Contents) -> str:
    rewards = contents.steps.column(REWARD)
    rewards = rewards[np.isfinite(rewards)]
    if not len(contents.steps):
        return "logs without a step"
    steps = f"{len(set(contents.steps.steps.tolist()))} steps"
    few = min(10, len(rewards))
    if not few:
        return steps
    return f"{steps}: reward {rewards[:few].mean():.3g} (first {few}) → {rewards[-few:].mean():.3g} (last {few})"


def _notes(condition: RunCondition, contents: Contents, passes: Sequence[Pass], onset: Onset | None) -> list[str]:
    notes = []
    if condition is RunCondition.RECOVERED and onset is not None and onset.stands:
        notes.append("the rewards came back by themselves: go back only to have the bad steps out of the weights")
    rewards = contents.steps.column(REWARD)
    if len(rewards) and not np.isfinite(rewards).any():
        notes.append(f"name the reward's key with --metric; keys: {', '.join(contents.keys[:8])} …")
    if 0 < (without := int((~np.isfinite(rewards)).sum())) < len(rewards):
        first = int(contents.steps.steps[np.flatnonzero(~np.isfinite(rewards))[0]])
        notes.append(f"{without} of {len(rewards)} steps have no reward that is a number, first step {first}")
    low, high = usual_range(rewards)
    if len(wild := np.flatnonzero(np.isfinite(rewards) & ((rewards < low) | (rewards > high)))) and len(rewards) >= 15:
        at, value = int(contents.steps.steps[wild[0]]), float(rewards[wild[0]])
        notes.append(f"{len(wild)} steps have rewards far from all others, first step {at}: {value:.3g}")
    if len(passes) > 1:
        numbers, backs = contents.steps.steps, contents.steps.backs
        next_steps = [numbers[one.begin] if one.begin < one.end else backs[-1].step + 1 for one in passes[1:]]
        back = [f"{numbers[one.begin - 1]} → {step}" for one, step in zip(passes[1:], next_steps, strict=True)]
        times = "once" if len(back) == 1 else f"{len(back)} times"
        notes.append(f"the steps went back {times}: {some_of(back, most=5)}")
    survived = Counter({str(kind): sum(h.count for h in contents.log_events if h.kind is kind) for kind in SURVIVED})
    if condition in UNEXPLAINED and survived.total():
        kinds = ", ".join(f"{name} × {count:,}" for name, count in survived.most_common() if count)
        notes.append(f"the run continued after all of this: {kinds}")
    if condition in UNEXPLAINED and not contents.has_server_log:
        notes.append("no server's log was read")
    return notes
