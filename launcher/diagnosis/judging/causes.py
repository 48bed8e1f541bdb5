"""Ranks the possible causes by what the rules see for and against each.

The scores order causes and show how sure that is; they are no probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.base.wording import some_of
from launcher.diagnosis.judging.incident_context import IncidentContext
from launcher.diagnosis.judging.rules import RULES, Guess, where_memory_ran_out
from launcher.diagnosis.reading.log_clock import say_duration
from launcher.diagnosis.reading.log_records import Kind, LogEvent, Role

SURE, LEAD = 3, 2
STRONG, EARLIER_S, FOLLOWED = 3, 60.0, -6
"""What began this long after a cause that is sure, by evidence this strong, came of it."""
UNPLACED_MATTERS = (
    *(Kind.OUT_OF_MEMORY, Kind.KILLED_FOR_MEMORY, Kind.KILLED, Kind.TRAINER_FAILED, Kind.REFUSED, Kind.LOST),
    *(Kind.SERVER_EXITED, Kind.SERVER_EXCEPTION, Kind.SERVER_WATCHDOG, Kind.NO_TOKENS),
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One piece of evidence for (weight > 0) or against a cause. `where`: file and line, where there is one. `time`:
    when it began, as LogEvent has it."""

    weight: int
    text: str
    where: str = ""
    time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCause:
    """A cause with its evidence, heaviest first. `where`: of memory, who ran out and when."""

    guess: Guess
    score: int
    supporting: tuple[Evidence, ...]
    opposing: tuple[Evidence, ...]
    where: str = ""

    @property
    def began(self) -> float | None:
        """When the first of its strong evidence happened."""
        return min((e.time for e in self.supporting if e.weight >= STRONG and e.time is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """All causes, the likeliest first. `is_sure`: the first stands out. `missing`: what was missing from the input."""

    ranked: tuple[RankedCause, ...]
    is_sure: bool
    missing: tuple[str, ...]

    @property
    def first(self) -> RankedCause | None:
        return self.ranked[0] if self.ranked and self.ranked[0].score > 0 else None


def weigh(context: IncidentContext) -> Causes:
    """The causes of what the context shows. The trainer's crash is named only where something speaks for it."""
    ranked = sorted(_earliest_first([_ranked(guess, context) for guess in Guess]), key=lambda one: -one.score)
    kept = [one for one in ranked if one.guess is not Guess.TRAINER_CRASH or one.supporting]
    is_sure = kept[0].score >= SURE and kept[0].score - kept[1].score >= LEAD
    return Causes(ranked=tuple(kept), is_sure=is_sure, missing=tuple(_missing_from(context)))


def _earliest_first(causes: Sequence[RankedCause]) -> Iterator[RankedCause]:
    """With evidence against those that began well after another that is sure: they followed from it."""
    begun = [(one.began, one.guess) for one in causes if one.score >= SURE and one.began is not None]
    first, guess = min(begun, default=(math.inf, None))
    for one in causes:
        if one.began is None or one.began - first <= EARLIER_S:
            yield one
        else:
            why = Evidence(FOLLOWED, f"it began {say_duration(one.began - first)} after the {guess}")
            yield replace(one, score=one.score + FOLLOWED, opposing=(why, *one.opposing))


def _ranked(guess: Guess, context: IncidentContext) -> RankedCause:
    seen = [_evidence(weight, *one) for weight, predicate in RULES[guess] for one in predicate(context)]
    found = sorted(seen, key=lambda one: -abs(one.weight))
    return RankedCause(
        guess=guess,
        score=sum(one.weight for one in found),
        supporting=tuple(one for one in found if one.weight > 0),
        opposing=tuple(one for one in found if one.weight < 0),
        where=where_memory_ran_out(context) if guess is Guess.OUT_OF_MEMORY else "",
    )


def _evidence(weight: int, text: str, events: Sequence[LogEvent]) -> Evidence:
    time = min((event.time for event in events if event.time is not None), default=None)
    return Evidence(weight, text, events[0].where if events else "", time)


def _missing_from(context: IncidentContext) -> Iterator[str]:
    """Which files would have shown more."""
    if not context.contents.has_server_log:
        yield "no server log was given (llm_server.log): a hang and a crash can't be distinguished"
    if not context.has_log(Role.TRAINER) and not context.near(Kind.INCIDENT, Kind.RUN_ENDED):
        yield "no trainer log was given (trainer.log): failed connections can't be seen"
    if unplaced := context.unplaced(*UNPLACED_MATTERS):
        what = some_of(sorted({f"{event.kind} ({event.where})" for event in unplaced}), most=4)
        yield f"not weighed, as nothing shows when this was among the steps: {what}"
    ended = context.near(Kind.KILLED, Kind.SERVER_EXITED)
    killed = [e for e in ended if e.kind is Kind.KILLED or e.facts.get("exit_code") in (-9, 137)]
    if killed and all(source.role is not Role.KERNEL for source in context.contents.sources):
        yield "a process was ended by SIGKILL; without a kernel log (dmesg -T > dmesg.log) it can't be seen who sent it"
