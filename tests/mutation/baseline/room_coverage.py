"""Which lines the quick unit tests pass, by room and by test; what their child processes pass counts too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import coverage

from tests.mutation.baseline.trials import OPTIONS, folders_of_tests

ROOMS = ("launcher", "actors", "scripts")


def measure_coverage(results: Path) -> None:
    """One run of all quick unit tests; what it found is kept in `results`. A test that fails is named there."""
    results.mkdir(parents=True, exist_ok=True)
    if data_file(results).exists():
        return
    environment = {**os.environ, "COVERAGE_FILE": str(data_file(results).resolve())}
    pytest = ["-m", "pytest", "-q", "-p", "tests.mutation.baseline.by_test", *OPTIONS, *folders_of_tests()]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "coverage", "run", *pytest], env=environment, check=False)
    print(f"coverage: {time.monotonic() - started:.0f} s", flush=True)
    combine(results)


def combine(results: Path) -> None:
    measured = coverage.Coverage(data_file=str(data_file(results).resolve()))
    measured.config.parallel = False
    measured.combine([str(part) for part in results.glob("coverage.data.*") if part.suffix != ".json"])
    measured.save()


def data_file(results: Path) -> Path:
    return results / "coverage.data"


def failed_tests(results: Path) -> list[str]:
    found: list[str] = json.loads((results / "coverage.data.tests.json").read_text())["failed"]
    return found


def by_room(results: Path) -> dict[str, tuple[int, int]]:
    """Of each folder with Python files: how many lines can be executed, and how many were passed."""
    measured = coverage.Coverage(data_file=str(data_file(results).resolve()))
    measured.load()
    there: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for path in sorted(path for room in ROOMS for path in Path(room).rglob("*.py")):
        _, lines, _, missing, _ = measured.analysis2(str(path.resolve()))
        there[str(path.parent)] += len(lines)
        passed[str(path.parent)] += len(lines) - len(missing)
    return {room: (there[room], passed[room]) for room in there if there[room]}
