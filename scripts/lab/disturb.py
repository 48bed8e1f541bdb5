"""What a kill or a stop costs: `python -m scripts.lab.disturb WHAT [--times N]`, again and again in a run of its own.

    server_killed    SIGKILL of a server's main process in the midst of a rollout, until the next tokens of its
                     completions: of one of two servers, and of a server alone
    server_stopped   SIGSTOP of a server's scheduler, HTTP process or both, in turn with stops that end after MOMENT_S:
                     until it is condemned, and its requests are answered elsewhere
    trainer_killed   SIGKILL of the trainer at a random moment, until the next committed step: parked, and cold

The learning rate is next to nothing, so that steps stay equal work. The ledger of each run is audited.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from actors.processes.process_tree import send
from launcher.reporting.run_facts import finite
from launcher.run_files.journal import LineTail, Record, read_lines
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import written_steps
from scripts.check_ledger import audited_facts
from scripts.faults import signals
from scripts.faults.started_run import Driver, at_s, committed, short_lived, until
from scripts.health.recorded_run import RecordedRun, read_view
from scripts.lab.cells import Points
from scripts.lab.measured import Measured, command
from scripts.lab.measured_run import TOKENS
from scripts.lab.overhead import SAME_WORK
from scripts.run_processes import find_run, find_servers

ENDLESS = ("total_train_steps=100000", "total_train_epochs=1000")
EACH_TOKEN = "rollout.stream_interval=1"
BEGUN_WITHIN_S = 900.0
SERVED_WITHIN_S = 400.0
BETWEEN_S = 5.0
"""Of undisturbed steps before a fault; up to two seconds more, drawn."""
SOON_S = 0.002
PARTS = ("scheduler", "http", "both")
MOMENT_S = 1.0
QUIET_S = 6.0
"""After a short stop, in which an alarm would come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault, and the points of it by their names; `arm` stands before the names, where there are several."""

    arm: str
    points: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Settings of a run in which a fault is struck so many times."""

    name: str
    settings: tuple[str, ...]
    strike: Callable[[RunPaths, Driver, Arm, int, random.Random], Mapping[str, float]]
    servers: int = 1
    module: str = "launcher"


@dataclass(slots=True)
class Found:
    struck: list[Struck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.lab.disturb", description="What a kill or a stop costs.")
    parser.add_argument("what", choices=ARMS, help="what is struck")
    parser.add_argument("--times", type=int, default=5, help="faults in each arm")
    parser.add_argument("--seed", type=int, default=0, help="for the targets and the moments")
    return command(parser, run)


def run(arguments: argparse.Namespace) -> Measured:
    draw, found = random.Random(arguments.seed), Found()
    for arm in ARMS[arguments.what]:
        words = [*SAME_WORK, *ENDLESS, *arm.settings, f"sglang.n_servers={arm.servers}", *arguments.overrides]
        with short_lived(words, module=arm.module) as (paths, process):
            try:
                for number in range(arguments.times):
                    wait_undisturbed(paths, process, arm, draw)
                    points = arm.strike(paths, process, arm, number, draw)
                    found.struck.append(Struck(arm=arm.name, points=points))
                    print(arm.name, *(f"{name} {value:.3f}" for name, value in points.items()), flush=True)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()
            audit = audited_facts(paths).audit
            found.problems += ["no ledger"] if audit is None else audit.doubts
    return measured(found)


def measured(found: Found) -> Measured:
    points: Points = {}
    for one in found.struck:
        for name, value in one.points.items():
            points.setdefault(f"{one.arm}_{name}", []).append(value)
    points["ledger_violations"] = [float(len(found.problems))]
    return Measured(points=points, notes=found.problems, raw=[asdict(one) for one in found.struck])


def wait_undisturbed(paths: RunPaths, process: Driver, arm: Arm, draw: random.Random) -> None:
    """Until all of its servers serve, and some steps more."""
    until(process, lambda: served(read_view(paths), arm.servers) or None, BEGUN_WITHIN_S)
    time.sleep(BETWEEN_S + 2 * draw.random())


def served(view: RecordedRun, servers: int) -> bool:
    """Whether all of so many servers have traffic."""
    return [one.state for one in view.servers.values()] == ["READY"] * servers


def seconds_to(events: Sequence[Record], event: str, name: str, at: float) -> float | None:
    """Seconds after `at` of the first such event of this subject."""
    moments = (at_s(e) - at for e in events if e.get("event") == event and e.get("subject") == name and at_s(e) > at)
    return next(moments, None)


def known(**seconds: float | None) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if value is not None}


# ── a killed server ──


def kill_server(paths: RunPaths, process: Driver, arm: Arm, number: int, draw: random.Random) -> Mapping[str, float]:
    """One that had no completion in the making is none: another is killed."""
    while not (made := _killed(paths, process, draw)):
        print(f"{arm.name}: nothing was in flight")
        wait_undisturbed(paths, process, arm, draw)
    return made[0]


def _killed(paths: RunPaths, process: Driver, draw: random.Random) -> list[dict[str, float]]:
    tokens = paths.logs / TOKENS
    victim = draw.choice(list(find_servers(paths)))
    arriving = LineTail(tokens, since=tokens.stat().st_size)

    def is_generating() -> bool | None:
        return any(line["server"] == victim.url for line in arriving.read()) or None

    until(process, is_generating, SERVED_WITHIN_S, SOON_S)
    at = time.monotonic()
    send(victim.http, signal.SIGKILL)

    def look() -> list[dict[str, float]] | None:
        return after_kill(at, victim.name, victim.url, list(read_lines(paths.events)), list(read_lines(tokens)))

    return until(process, look, SERVED_WITHIN_S)


def after_kill(
    at: float, name: str, url: str, events: Sequence[Record], tokens: Sequence[Record]
) -> list[dict[str, float]] | None:
    """Of the server `name`, which was killed at its `url`: seconds until the journal has its death, until its next
    incarnation has traffic, and until another server's first tokens of its completions, and whether those were of older
    weights than before. None while something is missing; nothing where it made no completion."""
    newest = max((int(str(line["version"])) for line in tokens if at_s(line) <= at), default=0)
    later = [line for line in tokens if at_s(line) > at and line["server"] != url]
    first = next((line for line in later if line["is_again"]), None)
    died, serves = seconds_to(events, "server.died", name, at), seconds_to(events, "server.ready", name, at)
    if died is None or serves is None:
        return None
    if first is None:
        return [] if any(int(str(line["version"])) > newest for line in later) else None
    is_older = int(str(first["version"])) < newest
    return [{"died_s": died, "serves_s": serves, "tokens_s": at_s(first) - at, "older_weights": float(is_older)}]


# ── a stopped server ──


def stop_server(paths: RunPaths, process: Driver, arm: Arm, number: int, draw: random.Random) -> Mapping[str, float]:
    """For good, and then another one for a moment."""
    part = PARTS[number % len(PARTS)]
    for_good = _stopped(paths, process, part, draw, is_short=False)
    wait_undisturbed(paths, process, arm, draw)
    return {**for_good, **_stopped(paths, process, part, draw, is_short=True)}


def _stopped(
    paths: RunPaths, process: Driver, part: str, draw: random.Random, *, is_short: bool
) -> Mapping[str, float]:
    victim = draw.choice(list(find_servers(paths)))
    stopped = [one for name in (("scheduler", "http") if part == "both" else (part,)) for one in victim.part(name)]
    at = time.monotonic()
    signals.stop(stopped)
    if is_short:
        time.sleep(MOMENT_S)
        signals.resume(stopped)
        time.sleep(QUIET_S)
    else:
        ready = "server.ready"
        until(process, lambda: seconds_to(list(read_lines(paths.events)), ready, victim.name, at), SERVED_WITHIN_S)
    return after_stop(list(read_lines(paths.events)), victim.name, at, is_short=is_short)


def after_stop(events: Sequence[Record], name: str, at: float, *, is_short: bool) -> Mapping[str, float]:
    """Of a short stop the alarms. Else seconds until its requests were moved (`silent_s`), which a stop between two
    rollouts has not; until it was condemned, and served again."""
    if is_short:
        verdicts = [e for e in events if at_s(e) > at and e.get("event") in ("health.dead", "health.suspect")]
        return {"alarms": float(len(verdicts))}
    return known(
        silent_s=seconds_to(events, "hedge.began", name, at),
        condemned_s=seconds_to(events, "health.dead", name, at),
        serves_s=seconds_to(events, "server.ready", name, at),
    )


# ── a killed trainer ──


def kill_trainer(paths: RunPaths, process: Driver, arm: Arm, number: int, draw: random.Random) -> Mapping[str, float]:
    before = committed(paths)
    until(process, lambda: committed(paths) > before or None, SERVED_WITHIN_S)  # a step of this incarnation
    trainer = until(process, lambda: find_run(paths).trainer, SERVED_WITHIN_S)
    time.sleep(draw.random())
    at, moment, before = time.monotonic(), time.time(), committed(paths)
    send(trainer, signal.SIGKILL)

    def look() -> float | None:
        times = (one.time - moment for one in written_steps(paths)[before:])
        return next((seconds for seconds in times if seconds > 0), None)

    def has_died() -> float | None:
        return seconds_to(list(read_lines(paths.events)), "trainer.died", "trainer", at)

    noticed = until(process, has_died, SERVED_WITHIN_S)
    next_step = until(process, look, SERVED_WITHIN_S)
    step_s = median(finite(one.step_s for one in written_steps(paths)))
    return {"noticed_s": noticed, "next_step_s": next_step, "beyond_a_step_s": next_step - step_s}


def kill_replaced_trainer(
    paths: RunPaths, process: Driver, arm: Arm, number: int, draw: random.Random
) -> Mapping[str, float]:
    """Once another one is parked, which takes longer than a few steps: a kill before that is one of another kind."""
    until(process, lambda: is_parked(list(read_lines(paths.events))) or None, SERVED_WITHIN_S)
    return kill_trainer(paths, process, arm, number, draw)


def is_parked(events: Sequence[Record]) -> bool:
    """Whether a process stands by to take over."""
    told = [event.get("event") for event in events if event.get("event") in ("trainer.parked", "trainer.took_over")]
    return told[-1:] == ["trainer.parked"]


AT_TWO = ("restart.server=1000", "restart.wait_max_s=1")
OFTEN_SAVED = ("recover.freq_steps=2", "restart.restore=1000", "restart.wait_max_s=1")
TIMED = "scripts.lab.measured_run"
ARMS = {
    "server_killed": (
        Arm(name="other", settings=(EACH_TOKEN,), strike=kill_server, servers=2, module=TIMED),
        Arm(name="alone", settings=(EACH_TOKEN,), strike=kill_server, module=TIMED),
    ),
    "server_stopped": (Arm(name="stopped", settings=AT_TWO, strike=stop_server, servers=2),),
    "trainer_killed": (
        Arm(name="parked", settings=(*OFTEN_SAVED, "recovery.standby_trainers=1"), strike=kill_replaced_trainer),
        Arm(name="cold", settings=(*OFTEN_SAVED, "recovery.standby_trainers=0"), strike=kill_trainer),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
