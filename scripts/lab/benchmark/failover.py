"""Benchmark `failover`: from a server's SIGKILL to the next tokens of its completions, at another server or alone.

In one run two servers serve and one of them, drawn, is killed; in another one there is one server, which starts again.
Each kill is in the midst of a rollout, of a server's main process, once all servers serve. What counts is when the
first tokens of a completion that was begun before arrive in the trainer from another incarnation
(timed_completions.py), on the clock that the kill is taken on; servers send each token. The learning rate is next to
nothing, so that steps stay equal work.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from actors.processes.process_tree import send
from launcher.run_files.journal import LineTail, Record, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.check_ledger import audited_facts
from scripts.faults.started_run import Driver, at_s, short_lived, until
from scripts.health.recorded_run import RecordedRun, read_view
from scripts.lab.benchmark.measured import Measured
from scripts.lab.benchmark.supervision import SAME_WORK
from scripts.lab.benchmark.timed_completions import TOKENS
from scripts.run_processes import find_servers

ARMS = {"other": 2, "alone": 1}
"""Servers."""
ENDLESS = ("total_train_steps=100000", "total_train_epochs=1000")
SETTINGS = (*ENDLESS, "rollout.stream_interval=1")
BEGUN_WITHIN_S = 900.0
SERVED_WITHIN_S = 400.0
BETWEEN_S = 5.0
"""Of undisturbed steps before a kill; up to two seconds more, drawn."""
SOON_S = 0.002

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Seconds from the signal to the journal's line of the death, to that of its next incarnation with traffic, and to
    the first tokens of its completions. `version` of those, and `newest` of all before the signal."""

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
    kills: list[Kill] = []
    problems: list[str] = []
    for arm, servers in ARMS.items():

        def disturb(paths: RunPaths, process: Driver, arm: str = arm) -> list[Kill]:
            return [kill(paths, process, arm, draw) for _ in range(arguments.kills)]

        words = [*SETTINGS, f"sglang.n_servers={servers}", *arguments.overrides]
        made, found = disturbed(words, disturb, module="scripts.lab.benchmark.timed_completions")
        kills += made
        problems += found
    return measured(kills, problems)


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
    """One whose server had no completion in the making is none: another is killed."""
    while (made := _killed(paths, process, arm, draw)) is None:
        print(f"{arm:8} nothing was in flight")
    print(f"{arm:8} died {made.died_s:.3f} s, serves {made.serves_s:.3f} s, tokens {made.tokens_s:.3f} s")
    return made


def _killed(paths: RunPaths, process: Driver, arm: str, draw: random.Random) -> Kill | None:
    tokens = paths.logs / TOKENS
    until(process, lambda: served(read_view(paths), ARMS[arm]) or None, BEGUN_WITHIN_S)
    time.sleep(BETWEEN_S + 2 * draw.random())
    victim = draw.choice(list(find_servers(paths)))
    arriving = LineTail(tokens, since=tokens.stat().st_size)
    until(
        process,
        lambda: any(line["server"] == victim.url for line in arriving.read()) or None,
        SERVED_WITHIN_S,
        SOON_S,
    )
    at = time.monotonic()
    send(victim.http, signal.SIGKILL)

    def look() -> list[Kill] | None:
        return outcome(arm, at, victim.name, victim.url, list(read_lines(paths.events)), list(read_lines(tokens)))

    return next(iter(until(process, look, SERVED_WITHIN_S)), None)


def served(view: RecordedRun, servers: int) -> bool:
    """Whether all of so many servers have traffic."""
    return [one.state for one in view.servers.values()] == ["READY"] * servers


def outcome(
    arm: str, at: float, name: str, url: str, events: Sequence[Record], tokens: Sequence[Record]
) -> list[Kill] | None:
    """Of the server `name`, which was killed at its `url`. None while something is missing; none of them where it made
    no completion."""

    def seconds(event_name: str) -> float | None:
        mine = (event for event in events if event.get("event") == event_name and event.get("subject") == name)
        return next((at_s(event) - at for event in mine if at_s(event) > at), None)

    newest = max((int(str(line["version"])) for line in tokens if at_s(line) <= at), default=0)
    later = [line for line in tokens if at_s(line) > at and line["server"] != url]
    first = next((line for line in later if line["is_again"]), None)
    died, serves = seconds("server.died"), seconds("server.ready")
    if died is None or serves is None:
        return None
    if first is None:
        return [] if any(int(str(line["version"])) > newest for line in later) else None
    return [
        Kill(
            arm=arm,
            died_s=died,
            serves_s=serves,
            tokens_s=at_s(first) - at,
            version=int(str(first["version"])),
            newest=newest,
        )
    ]


def measured(kills: Sequence[Kill], problems: Sequence[str]) -> Measured:
    points = {
        f"{arm}_{what}": [getattr(one, what) for one in kills if one.arm == arm]
        for arm in ARMS
        for what in ("died_s", "serves_s", "tokens_s")
    }
    points |= {
        "older_versions": [float(one.version < one.newest) for one in kills],
        "ledger_violations": [float(len(problems))],
    }
    return Measured(points=points, notes=problems, raw=[asdict(one) for one in kills])
