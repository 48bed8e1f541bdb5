"""A plugin of a coverage run (room_coverage.py): which test passes which line, and how long each takes.

What a test's child processes pass is measured too, without the test's name.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

durations: dict[str, float] = {}
failed: set[str] = set()
skipped: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    running = coverage.Coverage.current()
    assert running is not None, "python -m coverage run -m pytest -p tests.mutation.baseline.by_test …"
    running.switch_context(item.nodeid)
    started = time.monotonic()
    try:
        return (yield)
    finally:
        durations[item.nodeid] = time.monotonic() - started
        running.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed.add(report.nodeid)
    elif report.skipped:
        skipped.add(report.nodeid)


def pytest_sessionfinish() -> None:
    said = {
        "durations": {name: taken for name, taken in durations.items() if name not in failed | skipped},
        "failed": sorted(failed),
        "skipped": len(skipped),
    }
    Path(os.environ["COVERAGE_FILE"] + ".tests.json").write_text(json.dumps(said))
