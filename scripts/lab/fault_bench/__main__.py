"""The command of the fault benchmark: which cells, in which time, into which folder.

Exit codes: 0 measured, and marks are met or missed as results.md says; 1 the benchmark is not to be believed: a cell
broke, a no-op raised an alarm, or a switched-off detector was not missed; 2 the command is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from launcher.base.errors import UsageError
from scripts.ending import ended
from scripts.lab.fault_bench.cells import BY_NAME, CELLS, Cell
from scripts.lab.fault_bench.results import write_results
from scripts.lab.fault_bench.runs import Workplace
from scripts.lab.fault_bench.verdicts import BROKEN, NOT_RUN, RUN, SKIPPED, CellResult, Skipped, unbelievable, verdict

MINUTES, FULL_MINUTES = 20.0, 180.0


def main(words: Sequence[str] | None = None) -> int:
    return ended(lambda: _run(_parser().parse_args(words), list(sys.argv[1:] if words is None else words)), refused=1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.lab.fault_bench", description="What faults cost: ours against whole-job restarts."
    )
    parser.add_argument("--output", type=Path, default=Path("fault_bench"), help="new folder (default: fault_bench)")
    parser.add_argument("--cells", metavar="NAME,…", help="these alone, see --list")
    parser.add_argument("--full", action="store_true", help="denser storms, preemptions, 300 kills of the trainer too")
    parser.add_argument("--minutes", type=float, help=f"time budget (default: {MINUTES:g}, --full {FULL_MINUTES:g})")
    parser.add_argument("--seed", type=int, default=31, help="of the steps, targets and moments of faults")
    parser.add_argument("--list", action="store_true", help="show the cells, run nothing")
    parser.add_argument("overrides", nargs="*", help="settings of all runs")
    return parser


def _run(given: argparse.Namespace, words: Sequence[str]) -> int:
    cells = _chosen(given)
    if given.list:
        for cell in cells:
            print(f"{cell.name:16}{cell.expected_s:6.0f} s  {cell.arm}: {cell.how}")
        return 0
    usual = FULL_MINUTES if given.full else MINUTES
    budget_s = begin(given.output, usual if given.minutes is None else given.minutes, cells)
    facts = about("fault_bench", words)
    results = measure(
        cells, budget_s, partial(_run_cell, given), lambda found: write_results(given.output, facts, found)
    )
    print((given.output / "results.md").read_text())
    for problem in (problems := unbelievable(results)):
        print(f"not to be believed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _chosen(given: argparse.Namespace) -> list[Cell]:
    names = given.cells.split(",") if given.cells else [cell.name for cell in CELLS if given.full or not cell.is_full]
    if unknown := [name for name in names if name not in BY_NAME]:
        raise UsageError(f"--cells {','.join(unknown)}: no such cell", f"there are {', '.join(BY_NAME)}")
    return [cell for cell in CELLS if cell.name in names]


def _run_cell(given: argparse.Namespace, cell: Cell, before: Sequence[CellResult]) -> CellResult:
    usual = [seconds for one in before if one.name == "noop" for seconds in one.measures.get("usual_step_s", ())]
    place = Workplace(
        folder=given.output / "runs" / cell.name,
        seed=given.seed,
        overrides=tuple(given.overrides),
        usual_s=next(iter(usual), None),
    )
    return run_cell(cell, place)


# ── of any measurement in cells ──


def begin(output: Path, minutes: float, cells: Sequence[Cell]) -> float:
    """The budget in seconds; `output` is there from now on. Raises UsageError: no cell fits, the folder isn't empty."""
    least = min(cell.expected_s for cell in cells)
    if 60 * minutes < least:
        raise UsageError(f"--minutes {minutes:g}: no cell fits", f"give it {least / 60:.1f} or more")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is not an empty folder", "name a new one")
    output.mkdir(parents=True, exist_ok=True)
    return 60 * minutes


def about(tool: str, words: Sequence[str]) -> dict[str, str]:
    """What every result needs beside its figures."""
    return {
        "command": f"python -m scripts.{tool} {shlex.join(words)}".strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "load before": " ".join(f"{one:.1f}" for one in os.getloadavg()),
    }


def measure(
    cells: Sequence[Cell],
    budget_s: float,
    run: Callable[[Cell, Sequence[CellResult]], CellResult],
    write: Callable[[Sequence[CellResult]], None],
) -> list[CellResult]:
    """One after the other; `write` gets all so far after each. A cell that would not end in time, by how slow the
    machine is, is not begun."""
    began, expected_s = time.monotonic(), 0.0
    results: list[CellResult] = []
    for cell in cells:
        spent_s = time.monotonic() - began
        needs_s = cell.expected_s * max(1.0, spent_s / expected_s if expected_s else 1.0)
        if spent_s + needs_s > budget_s:
            reason = f"it needs about {needs_s:.0f} s, {budget_s - spent_s:.0f} s were left"
            results.append(_empty(cell, NOT_RUN, reason))
        else:
            print(f"── {cell.name}: {f'{cell.arm}, ' if cell.arm else ''}{cell.how}", flush=True)
            results.append(run(cell, results))
            expected_s += cell.expected_s * (results[-1].status == RUN)
        write(results)
    return results


def run_cell(cell: Cell, place: Workplace) -> CellResult:
    began, load = time.monotonic(), os.getloadavg()[0]
    try:
        measures = cell.run(place)
    except UsageError:
        raise
    except Skipped as skipped:
        return _empty(cell, SKIPPED, str(skipped))
    except Exception as error:  # noqa: BLE001 - whatever breaks a cell is its result; hours of others must not go with it
        broken = _empty(cell, BROKEN, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        return replace(broken, seconds=time.monotonic() - began, load=(load, os.getloadavg()[0]))
    done = replace(_empty(cell, RUN, ""), measures=measures, seconds=time.monotonic() - began)
    verdicts = tuple(verdict(mark, measures) for mark in cell.marks)
    return replace(done, verdicts=verdicts, load=(load, os.getloadavg()[0]))


def _empty(cell: Cell, status: str, reason: str) -> CellResult:
    return CellResult(name=cell.name, arm=cell.arm, how=cell.how, status=status, reason=reason, measures={})


if __name__ == "__main__":
    sys.exit(main())
