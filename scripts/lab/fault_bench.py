"""What faults cost, in one command with a budget of time: `python -m scripts.lab.fault_bench --help`.

A table of cells (cells.py), each a whole run on a CPU, in the order in which they are run: what must be believed first,
then the comparison.

    noop, traps         faults that do nothing or must stay unnoticed: each alarm is a false one
    detectors_off       ours with three detectors switched off: it must miss its marks
    storm, no_standby   one fault per 10 steps; ours, and ours without the parked trainer
    resume, by_hand     the whole job begins again after each fault, from a checkpoint or from step 0

run_measures.py has the figures of a run, fault_table.py writes results.md and results.json.

Exit codes: 0 measured, and marks are met or missed as results.md says; 1 the benchmark is not to be believed: a cell
broke, a no-op raised an alarm, or a switched-off detector was not missed; 2 the command is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.config.compose import compose
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import read_events
from launcher.run_files.run_paths import RunPaths
from scripts.ending import ended
from scripts.faults.campaign import Campaign, Rules
from scripts.faults.started_run import END_S, Driver, committed, started, until_committed
from scripts.lab.cells import Cell, Mark, MarkRole, Points, Way, Workplace, about, begin, chosen, measure
from scripts.lab.fault_table import unbelievable, write_results
from scripts.lab.run_measures import HANGS, run_measures
from scripts.storm import Result, drawn, read_result, run_under_faults, storm_words

MINUTES = 20.0
UNSUPERVISED = (
    *("health.silence_s=600", "health.silence_max_s=600", "health.stopped_s=600", "health.proof_s=600"),
    *("gate.distance_float32=null", "gate.max_reward_jump=null", "gate.canaries=0", "gate.recorded=0"),
    *("reward_health.zero_breaker_steps=null", "reward_health.fall_threshold=null"),
)
"""Nothing finds hangs, old weights or broken rewards; ends of processes are seen still."""
WITHOUT_STANDBY = ("recovery.standby_trainers=0",)
DISK_ALONE = ("recover.memory=false",)
NEVER_SAVED = (*DISK_ALONE, "recover.freq_steps=null", "recover.first_steps=null", "recover.freq_secs=null")
SILENT = frozenset({"C5", "S1", "S2"})
"""No process ends and nobody waits, so that a job without supervision goes on."""
WAIT_S, HANG_S = 10.0, 60.0
"""Until a lost job is begun again (AReaL's launcher); until a hang is found (slime's and miles' probes)."""

# ── how a cell is run ──


def words_of(place: Workplace, *settings: str) -> list[str]:
    return storm_words(place.folder.resolve(), overrides=["evaluator.freq_steps=null", *settings, *place.overrides])


def storm_run(faults: str, *settings: str) -> Way:
    """scripts.storm, in settings of ours."""

    def run(place: Workplace) -> Points:
        words = words_of(place, *settings)
        return points_of(RunPaths.of(compose(words)), run_under_faults(words, faults, seed=place.seed), place)

    return run


def restarted_run(faults: str, every: int, *settings: str) -> Way:
    """After each fault the whole job is ended and begins again; without supervision, and driven from out here.

    Kinder than any launcher: a loss is noticed at once, a hang after HANG_S without a step. A silent fault, and a hang
    that another server makes up for, is noticed by nobody.
    """

    def run(place: Workplace) -> Points:
        words = words_of(place, *UNSUPERVISED, *WITHOUT_STANDBY, *settings)
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
        return points_of(paths, result, place) | {"detected_s": [], "hang_detected_s": []}  # taken for granted

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


def points_of(paths: RunPaths, result: Result, place: Workplace) -> Points:
    usual = [seconds for one in place.before if one.name == "noop" for seconds in one.measures.get("usual_step_s", ())]
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
        usual_s=next(iter(usual), None),
    )


# ── the cells ──

OURS = "ours"
KINDS = "C1 C2 T1 C5 S1:seconds=4"
"""A server killed, one hung, the trainer killed, old weights, rewards of 0."""
TRAPS = "X-gc X-long:seconds=4 X-reward:seconds=3"
EVERY = 10
STEPS = ("total_train_steps=60", "recover.freq_steps=5")
STANDING_BY = ("recovery.standby_trainers=1",)
KEPT = ("rollout.stream_interval=4",)
"""Completions of these runs have 24 tokens at most: they would come in one part, and nothing of them could be kept."""

NO_ALARM = Mark(measure="alarms", limit=0, how="sum", of="steps", role=MarkRole.NO_ALARM)
FALSE = Mark(measure="alarms", limit=0, how="sum", of="steps")
WHOLE = (
    Mark(measure="finished", limit=1, at_least=True),
    Mark(measure="ledger_violations", limit=0, how="sum", of="steps"),
    Mark(measure="stale_steps", limit=0, how="sum", of="steps"),
    Mark(measure="zero_reward_steps", limit=0, how="sum", of="steps"),
)
IN_A_STORM = (
    *WHOLE,
    Mark(measure="semantic_ettr", limit=0.9, at_least=True),
    Mark(measure="hang_detected_s", limit=2.0, how="worst"),
    Mark(measure="hangs_unnoticed", limit=0, how="sum"),
)


def unseen(measure: str, detector: str) -> Mark:
    return Mark(measure=measure, limit=0, how="sum", role=MarkRole.MUST_MISS, detector=detector)


UNSEEN = (
    unseen("stale_steps", "gate.distance_float32"),
    unseen("zero_reward_steps", "gate.canaries"),
    unseen("hangs_unnoticed", "health.stopped_s and silence_s"),
)
CELLS = (
    Cell(
        name="noop",
        arm=OURS,
        how="4 faults that do nothing in 40 steps",
        run=storm_run("X-nonex4", "total_train_steps=40"),
        marks=(NO_ALARM, *WHOLE),
        expected_s=60,
    ),
    Cell(
        name="detectors_off",
        arm="ours less three detectors",
        how="C2 for 15 s, C5 and S1 in 35 steps",
        run=storm_run("C2:seconds=15 C5 S1:seconds=4", "total_train_steps=35", *UNSUPERVISED),
        marks=UNSEEN,
        expected_s=70,
    ),
    Cell(
        name="storm",
        arm=OURS,
        how=f"{KINDS}, one in about {EVERY} steps, two servers, a trainer standing by",
        run=storm_run(KINDS, *STEPS, *STANDING_BY, *KEPT),
        marks=IN_A_STORM,
        expected_s=100,
    ),
    Cell(
        name="resume",
        arm="whole job again, resumed",
        how="the same faults; a checkpoint every 5 steps",
        run=restarted_run(KINDS, EVERY, *STEPS, *DISK_ALONE),
        expected_s=240,
    ),
    Cell(
        name="traps",
        arm=OURS,
        how=f"{TRAPS} in 60 steps",
        run=storm_run(TRAPS, "total_train_steps=60"),
        marks=(FALSE, *WHOLE),
        expected_s=80,
    ),
    Cell(
        name="no_standby",
        arm="ours less the standby trainer",
        how="the same faults as in storm",
        run=storm_run(KINDS, *STEPS, *WITHOUT_STANDBY, *KEPT),
        marks=IN_A_STORM,
        expected_s=95,
    ),
    Cell(
        name="by_hand",
        arm="whole job again, from the first step",
        how="the same faults; no checkpoint",
        run=restarted_run(KINDS, EVERY, *STEPS, *NEVER_SAVED),
        expected_s=255,
    ),
)

# ── the command ──


def main(words: Sequence[str] | None = None) -> int:
    return ended(lambda: _run(_parser().parse_args(words), list(sys.argv[1:] if words is None else words)), refused=1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.lab.fault_bench", description="What faults cost: ours against whole-job restarts."
    )
    parser.add_argument("--output", type=Path, default=Path("fault_bench"), help="new folder (default: fault_bench)")
    parser.add_argument("--cells", metavar="NAME,…", help="these alone, see --list")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time budget (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=31, help="of the steps, targets and moments of faults")
    parser.add_argument("--list", action="store_true", help="show the cells, run nothing")
    parser.add_argument("overrides", nargs="*", help="settings of all runs")
    return parser


def _run(given: argparse.Namespace, words: Sequence[str]) -> int:
    cells = chosen(CELLS, given.cells, "--cells")
    if given.list:
        for cell in cells:
            print(f"{cell.name:16}{cell.expected_s:6.0f} s  {cell.arm}: {cell.how}")
        return 0
    budget_s = begin(given.output, given.minutes, cells)
    facts = about("lab.fault_bench", words)
    place = Workplace(folder=given.output, seed=given.seed, overrides=tuple(given.overrides))
    results = measure(cells, budget_s, place, lambda found: write_results(given.output, facts, found))
    print((given.output / "results.md").read_text())
    for problem in (problems := unbelievable(results)):
        print(f"not to be believed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
