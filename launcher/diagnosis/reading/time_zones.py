"""Brings the times of all files to one clock, and takes away those that can't be brought there.

Tables, events and dates that name their zone are unix seconds. A log's wall clock is tied to them, best first, by:

    measured   dates with a zone in the log itself; steps that it shares with a file of unix seconds
    recorded   the zone that a run of ours wrote down at its start, where nothing measured contradicts it
    assumed    another log of the run that is tied: programs of one machine share its zone

Where no log is tied, either all logs are compared among each other, as of one zone, or all the others. What then has
another clock than the steps loses its times: nobody is accused by them.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from launcher.base.utc_offsets import Offsets, local_offsets
from launcher.diagnosis.reading.log_clock import QUARTER_S, Anchor, PutBack, WallScale
from launcher.diagnosis.reading.log_records import Contents, Kind, LogEvent, Role, Source, Steps
from launcher.diagnosis.reading.server_pauses import SHORTEST_S, say_pause

LEAST_AGREEING = 0.8
"""Of the steps that two files share; others may be lines of another attempt."""
NEAR_S = 300.0
"""A step's line and its figures are written within this time; more is half a quarter of an hour, and says nothing."""
HOUR_S = 3600
HALF_AN_HOUR_S = 1800
FOLDED_S = 3 * HOUR_S
"""Within this time of a clock that was put back, it is that change."""
APART_S = 1200.0
"""Within this time of the steps a server of the same clock may have ended, or begun."""
PAUSES = (Kind.SILENCE, Kind.NO_TOKENS)


@dataclass(frozen=True, slots=True)
class WallClock:
    """How a log's wall clock becomes unix seconds: by its zone, and where the log's own dates were put back. `how`:
    what that rests on, for a person."""

    zone: Offsets
    put_back: tuple[PutBack, ...]
    how: str = ""

    def to_unix(self, wall: float) -> float:
        """`wall`: made to rise, see LogClock. An hour that came twice is the second one where the log had gone back."""
        back = bisect_right(self.put_back, wall, key=lambda one: one.wall) - 1
        shown = wall - (self.put_back[back].shift if back >= 0 else 0)
        is_again = back >= 0 and wall - self.put_back[back].wall < FOLDED_S
        early = HOUR_S if is_again else 0  # the change itself is known to the hour
        sinces = [-math.inf, *(since for since, _ in self.zone[1:])]
        begun = [(shown - offset, since) for since, (_, offset) in zip(sinces, self.zone, strict=True)]
        ends = [*sinces[1:], math.inf]
        possible = [unix for (unix, since), end in zip(begun, ends, strict=True) if since - early <= unix < end]
        if possible:
            return possible[-1 if is_again else 0]
        return next(unix for unix, since in reversed(begun) if since <= unix + HOUR_S)  # no clock there showed this


# ── of one log ──


def zone_of(anchors: Sequence[Anchor], scale: WallScale) -> Offsets | None:
    """None where they don't agree on the offset of a zone, up to changes of summer time."""
    near = [one for one in sorted(anchors, key=lambda one: one.wall) if abs(one.wall - one.unix - one.offset) <= NEAR_S]
    counts = Counter(one.offset for one in near)
    usual = max(counts, key=lambda offset: (counts[offset], -offset), default=0)
    near = [one for one in near if abs(one.offset - usual) in (0, HALF_AN_HOUR_S, HOUR_S)]
    if not near or len(near) < LEAST_AGREEING * len(anchors):
        return None
    changes = [(-math.inf, near[0].offset)]
    for before, after in pairwise(near):
        if after.offset != before.offset:  # clocks are changed at a full hour
            changes.append((min(math.ceil(before.wall / HOUR_S) * float(HOUR_S), after.wall), after.offset))
    for missing in scale.put_forward:  # where nothing is measured on both sides of it
        if near[-1].wall < missing:
            changes.append((missing, near[-1].offset + HOUR_S))
        elif near[0].wall > missing:
            changes = [(-math.inf, near[0].offset - HOUR_S), (missing, near[0].offset), *changes[1:]]
    return _zone(changes, scale.put_back)


def _zone(changes: Sequence[tuple[float, int]], put_back: Sequence[PutBack]) -> Offsets:
    """Of a clock that, made to rise, is so many seconds ahead of unix seconds from each of these places on."""
    found, before = list[tuple[float, int]](), changes[0][1]
    starts = [one.wall // HALF_AN_HOUR_S * HALF_AN_HOUR_S for one in put_back]
    for wall in sorted({*starts, *(wall for wall, _ in changes)}):
        ahead = next(seconds for start, seconds in reversed(changes) if start <= wall)
        at = bisect_right(starts, wall)
        found.append((wall - before, ahead - (put_back[at - 1].shift if at else 0)))
        before = ahead
    return tuple(found)


def agrees(zone: Offsets, anchors: Sequence[Anchor], scale: WallScale) -> bool:
    """Whether it brings them where they are known to be."""
    clock = WallClock(zone, scale.put_back)
    right = sum(abs(clock.to_unix(one.wall) - one.unix) <= QUARTER_S for one in anchors)
    return bool(anchors) and right >= LEAST_AGREEING * len(anchors)


# ── of all files ──


def on_one_clock(read: Sequence[Contents]) -> tuple[list[Contents], Offsets]:
    """The files with all times in unix seconds where that is known, else in those of the logs' own wall clock; and what
    the run's wall clock showed, by these."""
    read = [_of_several(one) if one.scale is not None and one.scale.is_mixed else one for one in read]
    recorded = next((one.utc_offsets for one in read if one.utc_offsets), ())
    clocks = _tied(read, recorded)
    longest = max(range(len(read)), key=lambda number: len(read[number].steps), default=0)
    is_unix = _is_unix(read, clocks, longest)
    if is_unix:
        done = [one if one.scale is None else _brought(one, clocks[number]) for number, one in enumerate(read)]
        return done, _shown(read, clocks, longest, recorded)
    alone = _untied(read, clocks)
    done = [_brought(one, alone.get(number)) for number, one in enumerate(read)]
    done = [_placed_beside(one, done[longest]) for one in done]
    return done, alone[longest].zone if longest in alone else ((-math.inf, 0),)


def _tied(read: Sequence[Contents], recorded: Offsets) -> dict[int, WallClock | None]:
    """Of each log whose dates name no zone, by its number. One that has hardly more than the line that its launcher
    wrote into it takes its changes of summer time from the run, where it is of the same zone."""
    scales = {number: one.scale for number, one in enumerate(read) if one.scale is not None}
    clocks = dict[int, WallClock | None]()
    zones = [recorded] if recorded else []
    for number, scale in scales.items():
        shared, name = _shared_steps(read[number], read)
        zone, how = next((one for one in zones if agrees(one, shared, scale)), None), ""
        if zone is None and (zone := zone_of(shared, scale)) is not None:
            how = f"its dates are taken as {say_zone(zone[0][1])}: by that its steps agree with {name}"
            zones.append(zone)
        if zone is not None or shared:
            clocks[number] = None if zone is None else WallClock(zone, scale.put_back, how)
    for number in scales.keys() - clocks.keys():
        scale = scales[number]
        zone = next((one for one in zones if agrees(one, scale.anchors, scale)), zone_of(scale.anchors, scale))
        if zone is None and recorded and not scale.anchors:
            zone = recorded
        clocks[number] = None if zone is None else WallClock(zone, scale.put_back)
    _share(clocks, read)
    return clocks


def _untied(read: Sequence[Contents], clocks: Mapping[int, WallClock | None]) -> dict[int, WallClock]:
    """The logs that nothing ties, as of one clock: what it was changed by in one of them counts for all."""
    scales = {number: scale for number, one in enumerate(read) if (scale := one.scale) and clocks[number] is None}
    back = list[PutBack]()
    for one in sorted((one for scale in scales.values() for one in scale.put_back), key=lambda one: one.wall):
        if not back or one.wall - back[-1].wall >= FOLDED_S:  # else: the same, in another log
            back.append(one)
    forward = sorted({hour for scale in scales.values() for hour in scale.put_forward})
    forward = [hour for hour in forward if all(_misses(read[number], hour) for number in scales)]
    zone = _zone([(-math.inf, 0), *((hour, count * HOUR_S) for count, hour in enumerate(forward, 1))], back)
    return {number: WallClock(zone, scale.put_back) for number, scale in scales.items()}


def _misses(contents: Contents, hour: float) -> bool:
    """Whether it has no date in an hour, so that a clock may have left it out; many lines say nothing else of it."""
    source, scale = contents.sources[0], contents.scale
    first, last = source.first_time, source.last_time
    is_outside = first is None or last is None or first >= hour or last < hour
    return is_outside or source.role is Role.KERNEL or (scale is not None and hour in scale.put_forward)


def _shared_steps(contents: Contents, read: Sequence[Contents]) -> tuple[list[Anchor], str]:
    """The times of steps that it shares with a file of unix seconds, of the file that shares the most; and its name."""
    best, name = list[Anchor](), ""
    own = _times_of_steps(contents.steps)
    for other in read:
        if other.scale is not None or not len(other.steps):
            continue
        theirs = _times_of_steps(other.steps)
        pairs = [
            Anchor(wall, unix)
            for step in own.keys() & theirs.keys()
            if len(own[step]) == len(theirs[step])
            for wall, unix in zip(own[step], theirs[step], strict=True)
            if math.isfinite(wall) and math.isfinite(unix)
        ]
        if len(pairs) > len(best):
            best, name = pairs, other.sources[0].path
    return best, name


def _times_of_steps(steps: Steps) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step, at in zip(steps.steps.tolist(), steps.times.tolist(), strict=True):
        found.setdefault(step, []).append(at)
    return found


def _share(clocks: dict[int, WallClock | None], read: Sequence[Contents]) -> None:
    """Logs that nothing ties are of the clock of those that something ties, where these agree."""
    known = [clock for clock in clocks.values() if clock is not None]
    offsets = {clock.zone[0][1] for clock in known}
    if len(offsets) != 1:
        return
    for number in [number for number, clock in clocks.items() if clock is None]:
        scale = read[number].scale
        assert scale is not None
        how = f"its dates are taken as {say_zone(*offsets)}, as those of the other logs"
        shared = WallClock(known[0].zone, scale.put_back, how)
        if not _lies_elsewhere(read[number], shared, read, clocks):
            clocks[number] = shared


def _lies_elsewhere(
    contents: Contents, clock: WallClock, read: Sequence[Contents], clocks: Mapping[int, WallClock | None]
) -> bool:
    """As the log of a machine in another zone would: not at the times of the steps."""
    longest = max(range(len(read)), key=lambda number: len(read[number].steps))
    other = clocks.get(longest)
    if contents is read[longest] or (read[longest].scale is not None and other is None):
        return False
    return _is_elsewhere(_brought_source(contents.sources[0], clock), _brought_source(read[longest].sources[0], other))


def _is_elsewhere(one: Source, steps: Source) -> bool:
    """Two logs of a run begin and end together, or lie at the same time at least in part."""
    if one.role is Role.KERNEL or one.first_time is None or one.last_time is None:
        return False
    if steps.first_time is None or steps.last_time is None:
        return False
    begin, end = one.first_time - steps.first_time, one.last_time - steps.last_time
    is_moved = abs(begin - end) <= NEAR_S and abs(begin) > HOUR_S // 2 - NEAR_S
    is_apart = one.last_time < steps.first_time - APART_S or one.first_time > steps.last_time + APART_S
    return is_moved or is_apart


def _is_unix(read: Sequence[Contents], clocks: Mapping[int, WallClock | None], longest: int) -> bool:
    """Whether the clock of the steps is unix seconds; where there is no step, that of most files."""
    if len(read[longest].steps) if read else False:
        return read[longest].scale is None or clocks[longest] is not None
    dated = any(event.time is not None for one in read if one.scale is None for event in one.log_events)
    return dated or not clocks or any(clocks.values())


def _shown(
    read: Sequence[Contents], clocks: Mapping[int, WallClock | None], longest: int, recorded: Offsets
) -> Offsets:
    known = [clocks.get(longest), *clocks.values()]
    if recorded:
        return recorded
    if (clock := next((one for one in known if one is not None), None)) is not None:
        return clock.zone
    times = [source.first_time for one in read for source in one.sources if source.first_time is not None]
    times += [event.time for one in read for event in one.log_events if event.time is not None]
    begin = min(times, default=time.time())
    days = int((max(times, default=begin) - begin) / 86_400) + 400
    return local_offsets(begin, min(days, 4000)) if 0 < begin < 4e9 else ()


def say_zone(offset: int) -> str:
    """`UTC+05:45`"""
    minutes = abs(offset) // 60
    return f"UTC{'-' if offset < 0 else '+'}{minutes // 60:02d}:{minutes % 60:02d}"


# ── bringing them there ──

NOT_COMPARED = "its times are not compared with those of the steps: nothing shows in which zone its dates are"
MIXED = "its times are not compared: its lines are of several clocks, whose dates go back and forth"
ELSEWHERE = "its times are not compared with those of the steps: they lie apart, as those of another zone do"


def _of_several(contents: Contents) -> Contents:
    return replace(_without_times(contents, MIXED), scale=None)


def _brought(contents: Contents, clock: WallClock | None) -> Contents:
    if clock is None:
        return _without_times(contents, NOT_COMPARED)
    (source,) = contents.sources
    return replace(
        contents,
        steps=contents.steps.at_times(clock.to_unix),
        log_events=tuple(one for event in contents.log_events if (one := _brought_event(event, clock)) is not None),
        sources=(_noted(_brought_source(source, clock), clock.how),),
    )


def _brought_source(source: Source, clock: WallClock | None) -> Source:
    if clock is None:
        return source
    first, last = (None if at is None else clock.to_unix(at) for at in (source.first_time, source.last_time))
    return replace(source, first_time=first, last_time=last)


def _brought_event(event: LogEvent, clock: WallClock) -> LogEvent | None:
    """A pause over a clock that was put forward is shorter than it seemed, or none."""
    begin, end = (None if at is None else clock.to_unix(at) for at in (event.time, event.last_time))
    moved = replace(event, time=begin, last_time=end)
    if event.kind not in PAUSES or begin is None or end is None:
        return moved
    seconds = max(end - begin, 0.0)
    if seconds < SHORTEST_S and not event.facts.get("is_last"):
        return None
    return replace(moved, text=say_pause(event.kind, seconds), facts={**event.facts, "seconds": seconds})


def _without_times(contents: Contents, why: str) -> Contents:
    if all(one.first_time is None for one in contents.sources) and not len(contents.steps) and not contents.log_events:
        return contents
    events = tuple(replace(event, time=None, last_time=None) for event in contents.log_events)
    sources = tuple(_noted(replace(one, first_time=None, last_time=None), why) for one in contents.sources)
    return replace(contents, steps=contents.steps.at_times(lambda at: math.nan), log_events=events, sources=sources)


def _placed_beside(contents: Contents, longest: Contents) -> Contents:
    is_beside = (
        contents is longest or not len(longest.steps) or not _is_elsewhere(contents.sources[0], longest.sources[0])
    )
    return contents if is_beside else _without_times(contents, ELSEWHERE)


def _noted(source: Source, note: str) -> Source:
    return replace(source, note="; ".join(filter(None, (source.note, note))))


def say_time(seconds: float | None, shown: Offsets) -> str:
    """As the run's own wall clock showed it."""
    if seconds is None:
        return ""
    at = bisect_right(shown, seconds, key=lambda one: one[0]) - 1
    offset = shown[max(at, 0)][1] if shown else 0
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds + offset))
