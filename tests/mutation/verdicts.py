"""What became of each mutant, which survivors are known and why, and the page that says so."""

from __future__ import annotations

import enum
import functools
import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.targets import TARGETS

KNOWN = Path(__file__).with_name("survivors.toml")
PAGE = Path(__file__).with_name("README.md")
COMMAND = "python -m tests.mutation"


class Outcome(enum.StrEnum):
    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    UNTESTED = "no test passes its line"


LIVES = (Outcome.SURVIVED, Outcome.UNTESTED)
DOUBTED = (*LIVES, Outcome.TIMED_OUT)
"""Tests may have been added since, and a busy machine takes long."""
COLUMNS = ("mutants", "killed", "equivalent", "survivors")
SURVIVORS = "## The survivors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A survivor that somebody has looked at. `is_equivalent`: no test could tell it from the code as it is."""

    why: str
    is_equivalent: bool


@functools.cache
def listed(path: str) -> dict[str, Known]:
    content = tomllib.loads(KNOWN.read_text()).get(path, {})
    return {
        name: Known(why=why, is_equivalent=kind == "equivalent")
        for kind, survivors in content.items()
        for why, names in survivors.items()
        for name in names
    }


def read(path: str, results: Path) -> dict[str, Outcome] | None:
    file = results / f"{path.replace('/', '.')}.json"
    return {name: Outcome(was) for name, was in json.loads(file.read_text()).items()} if file.exists() else None


def write(path: str, results: Path, found: Mapping[str, Outcome]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{path.replace('/', '.')}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))


def without_reason(path: str, results: Path) -> list[str]:
    """The survivors that nobody has looked at."""
    found = read(path, results) or {}
    new = [name for name, was in found.items() if was in LIVES and name not in listed(path)]
    return [f"{path}: {found[name]}, and not in {KNOWN.name}: {name}" for name in new]


def page(results: Path, before: str) -> str:
    """`before`: the page as it is. What it says of a module that has no results stays."""
    table, _, survivors_before = before.partition(SURVIVORS)
    rows, reasons, total = [], [], Counter()
    for path in TARGETS:
        found = read(path, results)
        if found is None:
            begin = f"| `{path}` | "
            rows += _lines(table, begin)[:1] or [f"{begin}not run | | | | |"]
            reasons += _lines(survivors_before, begin)
            figures = [int(cell) for cell in rows[-1].split("|")[2:6] if cell.strip().isdecimal()]
            total.update(dict(zip(COLUMNS, figures, strict=False)))
            continue
        lives = [name for name, was in found.items() if was in LIVES]
        equivalent = [name for name in lives if name in listed(path) and listed(path)[name].is_equivalent]
        killed, survivors = len(found) - len(lives), len(lives) - len(equivalent)
        total.update(dict(zip(COLUMNS, (len(found), killed, len(equivalent), survivors), strict=True)))
        rows.append(f"| `{path}` | {_row(len(found), killed, len(equivalent), survivors)} |")
        why = {name: listed(path)[name].why if name in listed(path) else "not looked at" for name in lives}
        reasons += [f"| `{path}` | `{_cell(name)}` | {_cell(why[name])} |" for name in lives if name not in equivalent]
    rows.append(f"| all | {_row(*(total[name] for name in COLUMNS))} |")
    return TEXT.format(command=COMMAND, rows="\n".join(rows), reasons="\n".join(reasons))


def _lines(text: str, begin: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(begin)]


def _row(mutants: int, killed: int, equivalent: int, survivors: int) -> str:
    share = f"{killed / (mutants - equivalent):.0%}" if mutants > equivalent else "–"
    return f"{mutants} | {killed} | {equivalent} | {survivors} | {share}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")


TEXT = """# Mutants

This page lists the small changes of the code that no test notices. A mutant is a module in which one comparison,
operand, number or statement is changed or removed; text is not changed. A test that fails kills the mutant. An
equivalent mutant behaves as the code does, and no test could kill it. `survivors.toml` lists the equivalents and the
survivors, each with its reason; `python -m pytest --long tests/mutation` fails where another mutant survives.

    {command} launcher/policy/routing.py actors/data/prompt_queue.py --page

This command tries the mutants of the named modules and writes this page from all results. The row of a module without
results stays as it is. `targets.py` names the tests of each module. `--again` tries only mutants that are new, survived
or timed out. Processes that a test starts run the code without the change.

| file | mutants | killed | equivalent | survivors | killed of those that are not equivalent |
|---|---|---|---|---|---|
{rows}

## The survivors

| file | mutant | why it stays |
|---|---|---|
{reasons}
"""
