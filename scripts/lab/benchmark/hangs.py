"""Benchmark `hangs`: a SIGSTOP of a server's process until it is condemned, and its requests are answered elsewhere.

Of two servers one at a time, drawn, at a drawn moment: its scheduler, its HTTP process, or both. In turn with stops
that end after MOMENT_S, which must condemn nobody. The learning rate is next to nothing, so that steps stay equal work.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.faults import signals
from scripts.faults.started_run import Driver, at_s, until
from scripts.health.recorded_run import read_view
from scripts.lab.benchmark.failover import BEGUN_WITHIN_S, BETWEEN_S, ENDLESS, SERVED_WITHIN_S, disturbed, served
from scripts.lab.benchmark.measured import Measured
from scripts.run_processes import find_servers

SERVERS = 2
SETTINGS = (
    *ENDLESS,
    *(f"sglang.n_servers={SERVERS}", "restart.server=1000", "restart.wait_max_s=1"),
)
PARTS = ("scheduler", "http", "both")
MOMENT_S = 1.0
QUIET_S = 6.0
"""After a short stop, in which an alarm would come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Seconds from the signal; None: that did not happen. `moved_s`: until each of its requests was heard of elsewhere,
    `silent_s`: until they were sent there; a stop between two rollouts has none. `alarms`: verdicts of a short one."""

    part: str
    is_short: bool
    silent_s: float | None
    moved_s: float | None
    condemned_s: float | None
    serves_s: float | None
    alarms: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hangs", type=int, default=12, help="stops for good, and as many short ones")
    parser.add_argument("--seed", type=int, default=0, help="for the servers, their processes and the moments")


def run(arguments: argparse.Namespace) -> Measured:
    draw = random.Random(arguments.seed)
    kinds = [(PARTS[n % len(PARTS)], is_short) for n in range(arguments.hangs) for is_short in (False, True)]

    def disturb(paths: RunPaths, process: Driver) -> list[Hang]:
        return [hang(paths, process, part, draw, is_short=is_short) for part, is_short in kinds]

    return measured(*disturbed([*SETTINGS, *arguments.overrides], disturb))


def hang(paths: RunPaths, process: Driver, part: str, draw: random.Random, *, is_short: bool) -> Hang:
    until(process, lambda: served(read_view(paths), SERVERS) or None, BEGUN_WITHIN_S)
    time.sleep(BETWEEN_S + 2 * draw.random())
    victim = draw.choice(list(find_servers(paths)))
    parts = ("scheduler", "http") if part == "both" else (part,)
    stopped = [one for name in parts for one in victim.part(name)]
    at = time.monotonic()
    signals.stop(stopped)
    if is_short:
        time.sleep(MOMENT_S)
        signals.resume(stopped)
        time.sleep(QUIET_S)
    else:
        until(process, lambda: _at(list(read_lines(paths.events)), "server.ready", victim.name, at), SERVED_WITHIN_S)
    made = outcome(list(read_lines(paths.events)), victim.name, at, part=part, is_short=is_short)
    print(made)
    return made


def outcome(events: Sequence[Record], name: str, at: float, *, part: str, is_short: bool) -> Hang:
    later = [event for event in events if at_s(event) > at]
    verdicts = [event for event in later if event.get("event") in ("health.dead", "health.suspect")]
    return Hang(
        part=part,
        is_short=is_short,
        silent_s=_at(later, "hedge.began", name, at),
        moved_s=_at(later, "hedge.ended", name, at),
        condemned_s=_at(later, "health.dead", name, at),
        serves_s=_at(later, "server.ready", name, at),
        alarms=len(verdicts) if is_short else 0,
    )


def _at(events: Sequence[Record], event: str, name: str, at: float) -> float | None:
    """Seconds after `at` of the first one of this server."""
    moments = (at_s(e) - at for e in events if e.get("event") == event and e.get("subject") == name and at_s(e) > at)
    return next(moments, None)


def measured(hangs: Sequence[Hang], problems: Sequence[str]) -> Measured:
    """`alarms`: of each stop of MOMENT_S."""
    points = {
        what: [seconds for one in hangs if not one.is_short and (seconds := getattr(one, what)) is not None]
        for what in ("silent_s", "moved_s", "condemned_s", "serves_s")
    }
    points |= {
        "alarms": [float(one.alarms) for one in hangs if one.is_short],
        "ledger_violations": [float(len(problems))],
    }
    return Measured(points=points, notes=problems, raw=[asdict(one) for one in hangs])
