"""What speaks for and against processes that failed: servers that crash or hang, memory that runs out, the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launcher.diagnosis.judging.evidence import Evidence, incidents, mean_count, seconds_of, seen_in, shown, times
from launcher.diagnosis.judging.incident_context import IncidentContext
from launcher.diagnosis.judging.onset import Shape
from launcher.diagnosis.reading.log_clock import say_duration
from launcher.diagnosis.reading.log_records import ROLLOUT_REWARD, ROLLOUT_S, Kind, LogEvent, Role
from launcher.policy.exit_cause import RanOut, find_server_cause, find_trainer_cause

PAUSE_S = 120.0


def of_server_crash(context: IncidentContext) -> Iterator[Evidence]:
    yield from incidents(context, "server_crash", "server_corrupt")
    if exits := context.near(Kind.SERVER_EXITED):
        code = exits[0].facts.get("exit_code")
        yield seen_in(3, exits, f"a server's process ended{'' if code is None else f' with exit code {code}'}")
    if raised := context.near(Kind.SERVER_EXCEPTION):
        yield seen_in(3, raised, "an exception ended a server")
    yield from _refusals(context, 3)
    if (lost := context.near(Kind.LOST)) and not context.earlier(Kind.LOST):
        yield seen_in(1, lost, f"{times(lost)} a connection broke, never before")
    change = context.change(ROLLOUT_S)
    if change is not None and change.is_clear and change.ratio < 0.5:
        yield Evidence(
            weight=1, text=f"rollouts failed fast: {change.before:.3g} s a step before, {change.after:.3g} s after"
        )
    yield from _explained_by_memory(context)
    yield from _still_generating(context)
    if context.has_log(Role.TRAINER) and not context.near(Kind.REFUSED, Kind.LOST, Kind.SERVER_EXITED):
        yield Evidence(weight=-2, text="no refused or broken connection around the onset")
    yield from _no_server_words(context)


def of_server_hang(context: IncidentContext) -> Iterator[Evidence]:
    yield from incidents(context, "server_hang")
    yield from _pauses(context)
    if fired := context.near(Kind.SERVER_WATCHDOG):
        yield seen_in(3, fired, "its own watchdog fired")
    if unwell := context.near(Kind.SERVER_UNHEALTHY):
        yield seen_in(2, unwell, f"{times(unwell)} its health check failed")
    refused = context.near(Kind.REFUSED)
    slow = context.near(Kind.TIMEOUT, Kind.REQUEST_FAILED)
    if slow and not refused and not context.earlier(Kind.TIMEOUT, Kind.REQUEST_FAILED):
        yield seen_in(2, slow, f"{times(slow)} a request got no answer in time, never before")
    change = context.change(ROLLOUT_S)
    if change is not None and change.is_clear and change.ratio >= 4:
        yield Evidence(
            weight=2, text=f"rollouts take {change.after:.3g} s a step, {change.before:.3g} s before: they wait"
        )
    elif change is not None and change.ratio < 1.5:
        yield Evidence(weight=-1, text=f"rollouts take no longer ({change.before:.3g} → {change.after:.3g} s a step)")
    if refused:
        yield seen_in(-2, refused, "connections are refused: a process that hangs still accepts them")
    if exits := context.near(Kind.SERVER_EXITED):
        yield seen_in(-2, exits, "the server's process ended")
    yield from _explained_by_memory(context)
    yield from _still_generating(context)
    yield from _no_server_words(context)


def of_memory(context: IncidentContext) -> Iterator[Evidence]:
    yield from incidents(context, "server_oom", "trainer_oom")
    ran_out = context.near(Kind.OUT_OF_MEMORY)
    if ran_out:
        yield seen_in(6, ran_out, f"{where_memory_ran_out(context)}: {shown(ran_out[0])}")
    if killed := context.near(Kind.KILLED_FOR_MEMORY):
        yield seen_in(2, killed, f"a process was killed by SIGKILL: {shown(killed[0])}")
    if [h for h in context.near(Kind.SERVER_EXITED) if h.facts.get("exit_code") in (-9, 137)] and not ran_out:
        yield Evidence(weight=1, text="a server ended by SIGKILL, as the kernel does for memory (dmesg would say so)")
    if not ran_out and any(source.what == "log" for source in context.contents.sources):
        yield Evidence(weight=-3, text="no log has a word of it around the onset")


def of_trainer_crash(context: IncidentContext) -> Iterator[Evidence]:
    yield from incidents(context, "trainer_crash", "trainer_hang")
    if failed := context.near(Kind.TRAINER_FAILED):
        yield seen_in(3, failed, f"the trainer failed: {shown(failed[0])}")
        if context.near(Kind.OUT_OF_MEMORY, role=Role.TRAINER):
            yield Evidence(weight=-2, text="it ran out of memory first")


def missing_from(context: IncidentContext) -> Iterator[str]:
    """Which files would have told more."""
    if not context.has_server_log:
        yield "no server log was given (llm_server.log): a hang and a crash can't be told apart by it"
    if not context.has_log(Role.TRAINER) and not context.near(Kind.INCIDENT, Kind.RUN_ENDED):
        yield "no trainer log was given (trainer.log): failed connections can't be seen"


def where_memory_ran_out(context: IncidentContext) -> str:
    """`server, at start-up`; "" where it did not."""
    ran_out = context.near(Kind.OUT_OF_MEMORY)
    if not ran_out:
        return ""
    who, place = place_of(ran_out[0])
    return f"{who}, in {place}" if place not in ("startup", "") else f"{who}, at start-up" if place else who


def place_of(event: LogEvent) -> tuple[str, str]:
    """(server or trainer, phase) of a line that says that memory ran out."""
    ran_out = str(event.facts.get("ran_out") or ran_out_of(event) or "")
    who = "server" if ran_out.startswith("server") else "trainer"
    phase = str(event.facts.get("phase") or "")
    if ran_out == RanOut.SERVER_POOL_TOO_SMALL:
        phase = "startup"
    elif ran_out == RanOut.SERVER_POOL:
        phase = "generation"
    return who, phase


def ran_out_of(event: LogEvent) -> RanOut | None:
    """Which memory it was, by the words of exit_cause.py."""
    line = str(event.facts.get("line") or event.text)
    said = event.facts.get("ran_out")
    if said in set(RanOut):
        return RanOut(str(said))
    find = find_server_cause if event.role is Role.SERVER else find_trainer_cause
    return find([line], None).ran_out or find_server_cause([line], None).ran_out


def _explained_by_memory(context: IncidentContext) -> Iterator[Evidence]:
    """A server that ran out of memory crashes or hangs for that reason: the remedy is memory's."""
    ran_out = [h for h in context.near(Kind.OUT_OF_MEMORY) if place_of(h)[0] == "server"]
    if ran_out:
        yield seen_in(-6, ran_out, "a server ran out of memory: what else it did came of that")


def _refusals(context: IncidentContext, weight: int) -> Iterator[Evidence]:
    refused = context.near(Kind.REFUSED)
    if not refused:
        return
    before = sum(h.count for h in context.earlier(Kind.REFUSED))
    said = "never before" if not before else f"{before} times before"
    since = f" from step {refused[0].after_step + 1} on" if refused[0].after_step is not None else ""
    is_new = mean_count(refused) > 3 * mean_count(context.earlier(Kind.REFUSED))
    yield seen_in(weight if is_new else 1, refused, f"{times(refused)} a connection was refused{since}, {said}")


def _pauses(context: IncidentContext) -> Iterator[Evidence]:
    """The server made no tokens while the trainer waited for some."""
    pauses = [h for h in context.near(Kind.NO_TOKENS) if not h.facts.get("is_last")]
    usual = [seconds_of(h) for h in context.earlier(Kind.NO_TOKENS) if not h.facts.get("is_last")]
    limit = max(PAUSE_S, 5 * float(np.median(usual)) if usual else 0.0)
    long = [h for h in pauses if seconds_of(h) >= limit]
    if long:
        longest = max(long, key=seconds_of)
        yield seen_in(3, [longest], f"a server made no tokens for {say_duration(seconds_of(longest))}")
    for last in (h for h in context.contents.log_events if h.kind is Kind.NO_TOKENS and h.facts.get("is_last")):
        end = _trainer_end(context)
        if last.time is None or end is None or context.until is None:
            continue
        if last.time <= context.until and end - last.time >= max(PAUSE_S, limit):
            yield seen_in(
                4,
                [last],
                f"a server made its last tokens {say_duration(end - last.time)} before the trainer's log ends",
            )


def _still_generating(context: IncidentContext) -> Iterator[Evidence]:
    """A server that makes tokens long after the onset neither hangs nor is gone."""
    if context.found is None or context.until is None:
        return
    lasts = [h for h in context.contents.log_events if h.kind is Kind.NO_TOKENS and h.facts.get("is_last")]
    if not lasts or context.near(Kind.SERVER_READY, Kind.SERVER_LAUNCHED):
        return
    after = max((h.time for h in lasts if h.time is not None), default=None)
    if after is None or after <= context.until:
        return
    if not [h for h in context.near(Kind.NO_TOKENS) if not h.facts.get("is_last") and seconds_of(h) >= PAUSE_S]:
        yield seen_in(-3, lasts, "the servers went on making tokens after the onset")


def _no_server_words(context: IncidentContext) -> Iterator[Evidence]:
    fall = context.found.fall if context.found else None
    if fall is not None and (context.vanished(ROLLOUT_REWARD) or fall.shape is Shape.MISSING):
        yield Evidence(weight=1, text="from the onset on no rollout finished (no rollout/reward)")


def _trainer_end(context: IncidentContext) -> float | None:
    """When the trainer's log ends, or the last step was done."""
    ends = [s.last_time for s in context.contents.sources if s.role is not Role.SERVER and s.last_time is not None]
    return max(ends, default=None)
