"""What the tests notice, as data: `python -m tests.mutation.baseline compare` measures anew and says what is lost.

measure   coverage of each room by the quick unit tests, then fixed mutants of each chosen module, with what kills each
keep      make what was measured the base line (tests/mutation/baseline/*.json); with FILE: of these modules only
compare   measure what has not been measured, of this commit, and compare it with the base line; exit code 0 or 1

What was measured lies in mutation-results/<commit>, and is gone on with after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.mutation.baseline import room_coverage
from tests.mutation.baseline.comparison import Comparison, all_of, compare_coverage, compare_mutants
from tests.mutation.baseline.defects import named_defects, no_longer_there
from tests.mutation.baseline.modules import in_turn
from tests.mutation.baseline.outcomes import NOT_ALL_RUN, Outcomes, names_a_test
from tests.mutation.baseline.trials import DRAWN, drawn, read_seen, source_hash, try_all
from tests.mutation.mutations import names_of

HERE = Path(__file__).parent
MUTANTS, COVERAGE, DEFECTS = HERE / "mutants.json", HERE / "coverage.json", HERE / "defects.json"
ROUND = 5
"""So many mutants of each module before more of any: where the time ends early, each module has been measured."""


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def result_file(results: Path, path: str) -> Path:
    return results / f"{path.replace('/', '.')}.json"


def read_results(results: Path, path: str) -> Outcomes:
    """Empty where the module has changed since."""
    file = result_file(results, path)
    found = json.loads(file.read_text()) if file.exists() else {}
    if not found or not Path(path).is_file() or found["source"] != source_hash(path):
        return {}
    outcomes: Outcomes = found["mutants"]
    return outcomes


def write_results(results: Path, path: str, outcomes: Outcomes) -> None:
    found = {"source": source_hash(path), "mutants": {**read_results(results, path), **outcomes}}
    whole = json.dumps(found, indent=1, ensure_ascii=False)
    staged = result_file(results, path).with_suffix(".new")
    staged.write_text(whole)  # what is read by the next command is whole, whenever this one is ended
    staged.replace(result_file(results, path))


def base_line() -> dict[str, Outcomes]:
    found: dict[str, Outcomes] = json.loads(MUTANTS.read_text())["modules"] if MUTANTS.exists() else {}
    return found


def wanted_of(path: str, before: Outcomes, *, anew: bool) -> dict[str, str]:
    """The mutants to try, with what became of each before: those that were noticed and whose code is still there.
    `anew`: of the base line all that are still there, and others that are drawn in place of those that are gone."""
    source = Path(path).read_text()
    there = {*names_of(source)}
    still = {name: was for name, was in before.items() if name in there}
    if not anew:
        return {name: was for name, was in still.items() if names_a_test(was)}
    others = [name for name in drawn(path, source) if name not in still]
    return still | dict.fromkeys(others[: max(0, DRAWN - len(still))], "")


def measure(
    results: Path, paths: list[str], minutes: float, *, anew: bool, again: bool = False, most_s: float = math.inf
) -> None:
    """`again`: also those for which not every test was run."""
    ends_at = time.monotonic() + minutes * 60
    room_coverage.measure_coverage(results)
    before = base_line()
    wanted = {path: wanted_of(path, before.get(path, {}), anew=anew) for path in paths if Path(path).is_file()}
    rounds = []
    for first in range(0, max(map(len, wanted.values()), default=0), ROUND):
        for path, mutants in wanted.items():
            done = read_results(results, path)
            doubted = {name for name, was in done.items() if again and was == NOT_ALL_RUN}
            drawn_now = [*mutants.items()][first : first + ROUND]
            left = {name: was for name, was in drawn_now if name not in done or name in doubted}
            if left:
                rounds.append((path, left))
    if rounds:
        try_all(read_seen(results), rounds, lambda path, found: write_results(results, path, found), ends_at, most_s)


def keep(results: Path, paths: list[str]) -> None:
    """Under the name of the folder of results, which is that of the commit that was measured. A module that is not
    among `paths` or not measured keeps its rows, and another one those whose code is still there. Where only some
    modules are named, the coverage and the defects stay as they are too."""
    modules = {path: rows for path, rows in base_line().items() if path in {*in_turn()}}
    for path in paths:
        if found := read_results(results, path):
            there = {*names_of(Path(path).read_text())}
            still = {name: was for name, was in modules.get(path, {}).items() if name in there}
            modules[path] = still | found
    number = {path: len(wanted_of(path, modules.get(path, {}), anew=True)) for path in sorted({*in_turn()})}
    had = {path: len(modules.get(path, {})) for path in number}
    unfinished = {path: f"{had[path]} of {number[path]}" for path in number if had[path] < number[path]}
    measured = {path: dict(sorted(modules[path].items())) for path in sorted(modules)}
    is_all = {*paths} >= {*in_turn()}
    name = results.name if is_all else json.loads(MUTANTS.read_text())["commit"]
    _write(MUTANTS, {"commit": name, "unfinished": unfinished, "modules": measured})
    if not is_all:
        return
    rooms = {room: list(lines) for room, lines in sorted(room_coverage.by_room(results).items())}
    failed = room_coverage.failed_tests(results)
    _write_rows(COVERAGE, {"commit": results.name, "failed_tests": failed, "rooms": rooms})
    _write(DEFECTS, named_defects())


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _write_rows(file: Path, content: Mapping[str, object]) -> None:
    """One line a room: its lines, and those that were passed."""
    rooms = content["rooms"]
    assert isinstance(rooms, dict)
    rows = ",\n".join(f"  {json.dumps(room)}: {json.dumps(lines)}" for room, lines in rooms.items())
    head = json.dumps({key: value for key, value in content.items() if key != "rooms"}, indent=1)
    file.write_text(f'{head[:-2]},\n "rooms": {{\n{rows}\n }}\n}}\n')


def compare(results: Path, paths: list[str]) -> Comparison:
    chosen = {path: outcomes for path, outcomes in base_line().items() if path in paths}
    after = {path: read_results(results, path) for path in chosen}
    rooms = {room: (lines[0], lines[1]) for room, lines in json.loads(COVERAGE.read_text())["rooms"].items()}
    defects = json.loads(DEFECTS.read_text())
    gone = Comparison(lost=[f"the defect that {name} named" for name in no_longer_there(defects)])
    return all_of(
        [compare_coverage(rooms, room_coverage.by_room(results)), compare_mutants(chosen, after), gone],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.baseline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["measure", "keep", "compare"])
    parser.add_argument("files", nargs="*", metavar="FILE", help="modules; all of modules.py, or of the base line")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further mutants after that")
    parser.add_argument("--seconds", type=float, default=3.0, help="measure: so much of tests for each mutant (3)")
    parser.add_argument("--again", action="store_true", help="measure: those too for which not every test was run")
    parser.add_argument("--results", type=Path, help="a folder (mutation-results/<commit>)")
    given = parser.parse_args()
    results = given.results or Path("mutation-results") / commit()
    if given.what == "measure":
        paths = given.files or [*in_turn()]
        measure(results, paths, given.minutes, anew=True, again=given.again, most_s=given.seconds)
        return 0
    if given.what == "keep":
        keep(results, given.files or [*in_turn()])
        return 0
    paths = given.files or [*base_line()]
    measure(results, paths, given.minutes, anew=False)
    said = compare(results, paths)
    print("\n".join(said.lines()))
    return said.exit_code


if __name__ == "__main__":
    sys.exit(main())
