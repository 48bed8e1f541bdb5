"""The traps of tests/traps.md name tests that exist, and leave no cell of a detector empty."""

import re

from tests.support.worlds.pages import REPOSITORY, functions_of

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
PAGE = (REPOSITORY / "tests" / "traps.md").read_text()


def tables():
    """The rows of each table, by its heading."""
    found, heading = {}, ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and heading:
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {name: rows[1:] for name, rows in found.items()}  # without their titles


def test_every_test_that_the_page_names_exists():
    named = NAMED.findall(PAGE)
    assert len(named) > 100
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []


def test_every_trap_and_every_column_of_every_detector_has_one():
    traps, silent, detectors = tables().values()
    assert (len(traps), len(silent)) == (22, 8)
    assert [row[0] for row in [*traps, *silent] if not NAMED.search(row[2])] == []
    assert len(detectors) >= 20
    assert [row[0] for row in detectors if len(row) != 4 or not all(map(NAMED.search, row[1:]))] == []
