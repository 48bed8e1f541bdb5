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
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TypeVar

from actors.processes.process_tree import send
from launcher.run_files.journal import Record, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.benchmark.measured import Measured
from scripts.benchmark.supervision import SAME_WORK
from scripts.benchmark.timed_completions import TOKENS
from scripts.check_ledger import audited_facts
from scripts.faults.run_processes import find_servers
from scripts.faults.started_run import Driver, at_s, short_lived, until
from scripts.health.recorded_run import RecordedRun, read_view

ARMS = ("standby", "cold")
ENDLESS = ("total_train_steps=100000", "total_train_epochs=1000")
SETTINGS = (*ENDLESS, "recovery.standby_servers=1", "rollout.stream_interval=1")
PARKED_WITHIN_S = 900.0
SERVED_WITHIN_S = 400.0
BETWEEN_S = 5.0
"""Of undisturbed steps before a kill; up to two seconds more, drawn."""
SOON_S = 0.002

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


def run(arguments: argparse.Namespace) -> Measured:
    draw = random.Random(arguments.seed)

    def disturb(paths: RunPaths, process: Driver) -> list[Kill]:
        return [kill(paths, process, arm, draw) for _ in range(arguments.kills) for arm in ARMS]

    words = [*SETTINGS, *arguments.overrides]
    return measured(*disturbed(words, disturb, module="scripts.benchmark.timed_completions"))


def disturbed(
    settings: Sequence[str], disturb: Callable[[RunPaths, Driver], T], *, module: str = "launcher"
) -> tuple[T, Sequence[str]]:
    """What `disturb` returned of a run that is ended then, and what is wrong with its ledger."""
    with short_lived([*SAME_WORK, *settings], module=module) as (paths, process):
        try:
            made = disturb(paths, process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        found = audited_facts(paths).audit
        return made, found.doubts if found is not None else ("no ledger",)


def kill(paths: RunPaths, process: Driver, arm: str, draw: random.Random) -> Kill:
    tokens = paths.logs / TOKENS
    standby = until(process, lambda: parked(read_view(paths)), PARKED_WITHIN_S)
    time.sleep(BETWEEN_S + 2 * draw.random())
    victims = [server for server in find_servers(paths) if arm == "cold" or server.name != standby]
    size = tokens.stat().st_size
    until(process, lambda: tokens.stat().st_size > size or None, SERVED_WITHIN_S, SOON_S)
    at = time.monotonic()
    for victim in victims:
        send(victim.http, signal.SIGKILL)
    urls = {victim.url for victim in victims}

    def look() -> Kill | None:
        return outcome(arm, at, urls, list(read_lines(paths.events)), list(read_lines(tokens)))

    made = until(process, look, SERVED_WITHIN_S)
    print(f"{arm:8} died {made.died_s:.3f} s, serves {made.serves_s:.3f} s, tokens {made.tokens_s:.3f} s")
    return made


def parked(view: RecordedRun) -> str | None:
    """The standby, where it is parked and all others have traffic."""
    states = {name: one.state for name, one in view.servers.items()}
    found = next((name for name in view.fleet.standbys if states.get(name) == "PARKED"), None)
    return found if all(state == "READY" for name, state in states.items() if name != found) else None


def outcome(
    arm: str, at: float, killed: Collection[str], events: Sequence[Record], tokens: Sequence[Record]
) -> Kill | None:
    """None while something of it is missing."""

    def seconds(*names: str) -> float | None:
        return next((at_s(event) - at for event in events if at_s(event) > at and event.get("event") in names), None)

    first = next((line for line in tokens if at_s(line) > at and line["server"] not in killed), None)
    died, serves = seconds("server.died"), seconds("server.ready", "server.promoted")
    if first is None or died is None or serves is None:
        return None
    return Kill(
        arm=arm,
        died_s=died,
        serves_s=serves,
        tokens_s=at_s(first) - at,
        version=int(str(first["version"])),
        newest=max((int(str(line["version"])) for line in tokens if at_s(line) <= at), default=0),
    )


def measured(kills: Sequence[Kill], problems: Sequence[str]) -> Measured:
    points = {
        f"{arm}_{what}": [getattr(one, what) for one in kills if one.arm == arm]
        for arm in ARMS
        for what in ("died_s", "serves_s", "tokens_s")
    }
    points |= {
        "cold_by_standby": [median(points["cold_tokens_s"]) / median(points["standby_tokens_s"])],
        "older_versions": [float(one.version < one.newest) for one in kills],
        "ledger_violations": [float(len(problems))],
    }
    return Measured(points=points, notes=problems, raw=[asdict(one) for one in kills])
