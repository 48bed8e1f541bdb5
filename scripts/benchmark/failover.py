"""Benchmark `failover`: from a server's SIGKILL to the next tokens, with a standby and without one, in one run.

Each kill is of the main process of every server that has traffic; those of the cold arm are of the standby too, in the
same moment. In turn, each once a standby is parked again, and in the midst of a rollout. What counts is when the first
tokens of a server that was not killed arrive in the trainer (timed_completions.py), on the clock that the kill is taken
on; servers send each token. The learning rate is next to nothing, so that steps stay equal work.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from actors.processes.process_tree import send
from actors.supervision.fleet_record import FleetRecord
from launcher.base.errors import RunError
from launcher.config.compose import compose
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.experiment import PRESET
from scripts.benchmark.ratios import spread
from scripts.benchmark.supervision import SAME_WORK
from scripts.benchmark.timed_completions import TOKENS
from scripts.faults.run_processes import find_servers
from scripts.storm import started

ARMS = ("standby", "cold")
SETTINGS = (
    *("total_train_steps=100000", "total_train_epochs=1000"),
    *("recovery.standby_servers=1", "rollout.stream_interval=1"),
)
PARKED_WITHIN_S = 900.0
SERVED_WITHIN_S = 400.0
BETWEEN_S = 5.0
"""Of undisturbed steps before a kill; up to two seconds more, drawn."""
NO_STATE = ("_failed", ".slow", ".pace_back", ".joined", ".restarted")
TRAFFIC = frozenset({"server.ready", "server.promoted"})

LOOK_S, SOON_S = 0.2, 0.002

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Seconds from the signal to the journal's line of the death, to that of a server with traffic, and to the first
    tokens. `version` of those, and `newest` of all before the signal."""

    arm: str
    died_s: float
    serves_s: float
    tokens_s: float
    version: int
    newest: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=5, help="of each arm")
    parser.add_argument("--seed", type=int, default=0, help="for the moments of the kills")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    draw = random.Random(arguments.seed)

    def disturb(paths: RunPaths, process: subprocess.Popen[bytes]) -> list[Kill]:
        return [kill(paths, process, arm, draw) for _ in range(arguments.kills) for arm in ARMS]

    words = [*SETTINGS, *arguments.overrides]
    return report(*disturbed(words, disturb, module="scripts.benchmark.timed_completions"))


def disturbed(
    words: Sequence[str], disturb: Callable[[RunPaths, subprocess.Popen[bytes]], T], *, module: str = "launcher"
) -> tuple[T, Sequence[str]]:
    """What `disturb` returned of a run that is ended then, and what is wrong with its ledger."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        words = [PRESET, f"cluster.fileroot={folder}", *SAME_WORK, *words]
        paths = RunPaths.of(compose(words))
        with started(words, paths, module=module) as process:
            try:
                made = disturb(paths, process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()
        found = read_facts(paths).audit
        return made, found.problems if found is not None else ("no ledger",)


def kill(paths: RunPaths, process: subprocess.Popen[bytes], arm: str, draw: random.Random) -> Kill:
    standby = until(process, lambda: parked(lines_of(paths.events)), PARKED_WITHIN_S)
    time.sleep(BETWEEN_S + 2 * draw.random())
    victims = [server for server in find_servers(paths) if arm == "cold" or server.name != standby]
    size = (paths.logs / TOKENS).stat().st_size
    until(process, lambda: (paths.logs / TOKENS).stat().st_size > size or None, SERVED_WITHIN_S, SOON_S)
    at = time.monotonic()
    for victim in victims:
        send(victim.http, signal.SIGKILL)
    urls = {victim.url for victim in victims}
    made = until(
        process, lambda: outcome(arm, at, urls, lines_of(paths.events), lines_of(paths.logs / TOKENS)), SERVED_WITHIN_S
    )
    print(f"{arm:8} died {made.died_s:.3f} s, serves {made.serves_s:.3f} s, tokens {made.tokens_s:.3f} s")
    return made


def parked(events: Sequence[Record]) -> str | None:
    """The standby, where it is parked and all others have traffic."""
    states, standbys = _states(events)
    stand_by = [name for name in standbys if states.get(name) == "server.parked"]
    return stand_by[0] if stand_by and _serving(states) + len(stand_by) == len(states) else None


def served(events: Sequence[Record]) -> bool:
    """Whether all servers have traffic."""
    states, _ = _states(events)
    return bool(states) and _serving(states) == len(states)


def _serving(states: Mapping[str, str]) -> int:
    return sum(state in TRAFFIC for state in states.values())


def _states(events: Sequence[Record]) -> tuple[dict[str, str], Collection[str]]:
    """The last event of each server that says what it does, and which servers stand by."""
    fleet, states = FleetRecord(), dict[str, str]()
    for event in events:
        fleet.take(event)
        name = str(event.get("event"))
        if name.startswith("server.") and not name.endswith(NO_STATE):
            states[str(event.get("subject"))] = name
    return states, fleet.standbys


def outcome(
    arm: str, at: float, killed: Collection[str], events: Sequence[Record], tokens: Sequence[Record]
) -> Kill | None:
    """None while something of it is missing."""
    first = next((line for line in tokens if at_s(line) > at and line["server"] not in killed), None)
    died = next((event for event in events if at_s(event) > at and event.get("event") == "server.died"), None)
    serves = next((event for event in events if at_s(event) > at and event.get("event") in TRAFFIC), None)
    if first is None or died is None or serves is None:
        return None
    return Kill(
        arm=arm,
        died_s=at_s(died) - at,
        serves_s=at_s(serves) - at,
        tokens_s=at_s(first) - at,
        version=int(str(first["version"])),
        newest=max((int(str(line["version"])) for line in tokens if at_s(line) <= at), default=0),
    )


def report(kills: Sequence[Kill], problems: Sequence[str]) -> dict[str, object]:
    for what in ("died_s", "serves_s", "tokens_s"):
        for arm in ARMS:
            seconds = [getattr(one, what) for one in kills if one.arm == arm]
            print(f"{what:9} {arm:8} {spread(seconds, ' s', 3)}")
    medians = {arm: median(one.tokens_s for one in kills if one.arm == arm) for arm in ARMS}
    older = sum(one.version < one.newest for one in kills)
    print(f"cold ÷ standby: {medians['cold'] / medians['standby']:.0f}; tokens of an older version: {older}")
    print(f"ledger: {'; '.join(problems) or 'complete'}")
    return {"median_tokens_s": medians, "problems": list(problems), "kills": [asdict(one) for one in kills]}


def until(
    process: subprocess.Popen[bytes], look: Callable[[], T | None], within_s: float, between_s: float = LOOK_S
) -> T:
    give_up_at = time.monotonic() + within_s
    while (found := look()) is None:
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise RunError(f"the run has ended, or nothing came of it within {within_s:g} s", "give it a quiet machine")
        time.sleep(between_s)
    return found


def lines_of(path: Path) -> list[Record]:
    return list(read_lines(path)) if path.exists() else []


def at_s(line: Record) -> float:
    return float(str(line.get("monotonic", 0.0)))
