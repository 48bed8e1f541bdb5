"""How cells are run: a storm, a job that begins again after each fault, preemptions, a benchmark that there is."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.config.compose import compose
from launcher.reporting.run_facts import finite, read_facts
from launcher.run_files.journal import read_events
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import written_steps
from scripts.faults.campaign import Campaign, Rules
from scripts.faults.interposer import SETTINGS
from scripts.faults.started_run import END_S, Driver, committed, started, started_interposer, until_committed
from scripts.lab.benchmark.__main__ import parser
from scripts.lab.benchmark.measured import Points
from scripts.lab.fault_bench.measures import HANGS, run_measures
from scripts.storm import Result, drawn, read_result, run_under_faults, storm_words

UNSUPERVISED = (
    *("health.silence_s=600", "health.silence_max_s=600", "health.stopped_s=600", "health.proof_s=600"),
    *("gate.distance_float32=null", "gate.max_reward_jump=null", "gate.canaries=0", "gate.recorded=0"),
    *("reward_health.zero_breaker_steps=null", "reward_health.fall_threshold=null"),
)
"""Nothing finds hangs, old weights or broken rewards; ends of processes are seen still."""
WITHOUT_STANDBY = ("recovery.standby_trainers=0",)
DISK_ALONE = ("recover.memory=false",)
NEVER_SAVED = (*DISK_ALONE, "recover.freq_steps=null", "recover.first_steps=null", "recover.freq_secs=null")
SILENT = frozenset({"C5", "C6", "S1", "S2"})
"""No process ends and nobody waits, so that a job without supervision goes on."""
WAIT_S, HANG_S = 10.0, 60.0
"""Until a lost job is begun again (AReaL's launcher); until a hang is found (slime's and miles' probes)."""
NOTICE_S, RETURN_S = 30.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where a cell writes, and what all share. `usual_s`: a step's seconds in the cell `noop`."""

    folder: Path
    seed: int
    overrides: tuple[str, ...]
    usual_s: float | None

    def words(self, *settings: str) -> list[str]:
        return storm_words(self.folder.resolve(), overrides=["evaluator.freq_steps=null", *settings, *self.overrides])


Way = Callable[[Workplace], Points]


def storm_run(faults: str, *settings: str, interposed: bool = False) -> Way:
    """scripts.storm, in settings of ours."""

    def run(place: Workplace) -> Points:
        words = place.words(*settings, *(SETTINGS.split() if interposed else ()))
        paths = RunPaths.of(compose(words))
        with started_interposer(paths) if interposed else contextlib.nullcontext():
            return points_of(paths, run_under_faults(words, faults, seed=place.seed), place.usual_s)

    return run


def restarted_run(faults: str, every: int, *settings: str) -> Way:
    """After each fault the whole job is ended and begins again; without supervision, and driven from out here.

    Kinder than any launcher: a loss is noticed at once, a hang after HANG_S without a step. A silent fault, and a hang
    that another server makes up for, is noticed by nobody.
    """

    def run(place: Workplace) -> Points:
        words = place.words(*UNSUPERVISED, *WITHOUT_STANDBY, *settings)
        config = compose(words)
        paths, to_come = RunPaths.of(config), deque(drawn(faults, config, seed=place.seed))
        asked, began, exit_code = len(to_come), time.monotonic(), None
        while exit_code is None:
            with started(words, paths) as process:
                due = committed(paths) + every
                while to_come:
                    until_committed(process, paths, due)
                    due = committed(paths) + every
                    fault = replace(to_come.popleft(), at_step=None)
                    rules = Rules(seed=place.seed + len(to_come), within_s=120.0, even_the_last=True)
                    Campaign(paths, rules, say=print).run([fault])
                    if fault.kind.id in HANGS and not stands_still(process, paths, due):
                        continue
                    if fault.kind.id not in SILENT:
                        break
                else:
                    exit_code = process.wait(END_S)
            time.sleep(WAIT_S if exit_code is None else 0.0)
        seconds = time.monotonic() - began
        result = read_result(paths, seed=place.seed, asked=asked, exit_code=exit_code, seconds=seconds)
        return points_of(paths, result, place.usual_s) | {"detected_s": [], "hang_detected_s": []}  # taken for granted

    return run


def stands_still(process: Driver, paths: RunPaths, due: int) -> bool:
    """Whether it takes no step for HANG_S, before it has taken `due` in all or has ended."""
    last, since = committed(paths), time.monotonic()
    while process.poll() is None and last < due:
        if time.monotonic() - since > HANG_S:
            return True
        time.sleep(0.1)
        if (now := committed(paths)) > last:
            last, since = now, time.monotonic()
    return False


def preempted_run(notices: Sequence[bool], every: int, *settings: str) -> Way:
    """A spot machine: noticed or not, it is taken away and comes back; the same command is given again."""

    def run(place: Workplace) -> Points:
        notice = place.folder.resolve() / "notice"
        words = place.words(f"run.preemption_notice={notice}", "run.notice_s=15", "run.margin_s=5", *settings)
        paths, found = RunPaths.of(compose(words)), Points(saved_s=[], saved=[], return_s=[])
        returned = began = time.monotonic()
        for number, is_noticed in enumerate((*notices, None)):
            before = committed(paths)
            with started(words, paths) as process:
                until_committed(process, paths, before + 1)
                found["return_s"] += [time.monotonic() - returned] * (number > 0)
                if is_noticed is None:
                    exit_code = process.wait(END_S)
                    break
                until_committed(process, paths, before + every)
                if is_noticed:
                    notice.touch()
                    at = time.monotonic()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(NOTICE_S)
                        found["saved_s"].append(time.monotonic() - at)
                    found["saved"].append(float(process.poll() == 75))
            notice.unlink(missing_ok=True)
            time.sleep(RETURN_S)
            returned = time.monotonic()
        result = read_result(paths, seed=0, asked=0, exit_code=exit_code, seconds=time.monotonic() - began)
        made = sum(finite(line.tokens for line in written_steps(paths)))
        standing = sum(finite(line.tokens for line in read_facts(paths).steps))
        return points_of(paths, result, place.usual_s) | found | {"tokens_salvaged": [standing / made]}

    return run


def points_of(paths: RunPaths, result: Result, usual_s: float | None) -> Points:
    facts = read_facts(paths)
    return run_measures(
        standing=facts.steps,
        undone=[line for lines in facts.taken_back for line in lines],
        kept_tokens=facts.figures.total("rollout/kept_tokens"),
        events=list(read_events(paths.events)),
        faults=result.outcomes,
        asked=result.asked,
        audit=result.audit,
        exit_code=result.exit_code,
        usual_s=usual_s,
    )


def benchmark_run(*words: str) -> Way:
    """One of scripts.lab.benchmark, by its command line."""

    def run(place: Workplace) -> Points:
        arguments = parser([*words]).parse_args([*words, *place.overrides])
        points: Points = arguments.run(arguments).points
        return points

    return run
