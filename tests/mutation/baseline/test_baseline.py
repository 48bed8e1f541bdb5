"""The comparison with the base line sees what is lost, and what it can't say; the base line is what it says it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.baseline import __main__ as command
from tests.mutation.baseline.comparison import all_of, compare_coverage, compare_mutants
from tests.mutation.baseline.defects import named_defects, no_longer_there
from tests.mutation.baseline.modules import CHOSEN, in_turn
from tests.mutation.baseline.outcomes import LATE, SURVIVED, UNTESTED, killer_of, names_a_test
from tests.mutation.baseline.trials import drawn
from tests.mutation.mutations import names_of

REPOSITORY = Path(__file__).parents[3]
SOURCE = "def f(a):\n    return a > 0\n\n\nclass C:\n    def g(self, a):\n        return a + 1\n"
KILLER = "tests/unit/test_m.py::test_f"
GREATER, LESS, PLUS = "f: a > 0 → a >= 0", "f: a > 0 → a <= 0", "C.g: a + 1 → a - 1"
BEFORE = {"launcher/m.py": {GREATER: KILLER, LESS: f"{LATE}{KILLER}", PLUS: KILLER, "C.g: 1 → 2": SURVIVED}}
"""Three that were noticed, and one that was not."""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "m.py").write_text(SOURCE)
    return tmp_path


def after(**changed):
    """Every mutant that was noticed still is, by another test, but for `changed`."""
    noticed = dict.fromkeys((GREATER, LESS, PLUS), "tests/rules/test_n.py::test_other")
    return {"launcher/m.py": noticed | {name: was for name, was in changed.items() if was is not None}}


def test_the_same_mutants_noticed_by_another_test_are_no_loss(root):
    said = compare_mutants(BEFORE, after(), root)
    assert (said.lost, said.moved, said.unmeasured, said.exit_code) == ([], [], [], 0)


@pytest.mark.parametrize("was", [SURVIVED, UNTESTED])
@pytest.mark.parametrize("name", [GREATER, LESS, PLUS])
def test_a_mutant_that_was_noticed_and_lives_is_lost(root, name, was):
    said = compare_mutants(BEFORE, after(**{name: was}), root)
    assert said.lost == [f"launcher/m.py: {name}: {was}; it was killed by {BEFORE['launcher/m.py'][name]}"]
    assert said.exit_code == 1
    assert [*said.lines()][-1] == "1 lost, 0 not measured, 0 gone or moved"


def test_one_that_lived_before_may_live_on(root):
    assert compare_mutants(BEFORE, after(**{"C.g: 1 → 2": SURVIVED}), root).exit_code == 0


def test_one_that_was_not_measured_shows_nothing_and_does_not_pass(root):
    found = after()
    del found["launcher/m.py"][PLUS]
    said = compare_mutants(BEFORE, found, root)
    assert said.unmeasured == [f"launcher/m.py: {PLUS}"]
    assert said.lost == []
    assert said.exit_code == 1
    assert len(compare_mutants(BEFORE, {}, root).unmeasured) == 3


def test_moved_lines_change_nothing(root):
    file = root / "launcher" / "m.py"
    file.write_text("import os\n\n\ndef new():\n    return os.sep\n\n\n" + SOURCE)
    assert compare_mutants(BEFORE, after(), root).moved == []


def test_a_module_a_scope_and_code_that_are_gone_are_answers_of_their_own(root):
    file = root / "launcher" / "m.py"
    file.write_text("def f(a):\n    return a > 0 or not a\n")
    said = compare_mutants(BEFORE, after(), root)
    assert said.moved == [f"launcher/m.py: the scope of {PLUS}"]
    file.write_text("def f(a):\n    return a < 0\n")
    assert compare_mutants(BEFORE, after(), root).moved[0] == f"launcher/m.py: the code of {GREATER}"
    file.unlink()
    said = compare_mutants(BEFORE, after(), root)
    assert said.moved == ["launcher/m.py: the module, with 3 mutants that were killed"]
    assert said.exit_code == 0


def test_a_room_whose_lines_are_passed_less_is_a_loss_beyond_a_point():
    before = {"launcher/cli": (1000, 900), "launcher/base": (200, 200)}
    said = compare_coverage(before, {"launcher/cli": (1000, 890), "launcher/base": (200, 200)})
    assert said.lost == []
    assert "launcher/cli: 900 of 1000 lines (90.0 %) → 890 of 1000 lines (89.0 %)" in said.shown
    said = compare_coverage(before, {"launcher/cli": (1000, 889), "launcher/new": (10, 0)})
    assert said.lost == ["coverage of launcher/cli: 900 of 1000 lines (90.0 %) → 889 of 1000 lines (88.9 %)"]
    assert said.moved == ["launcher/base: the room"]
    assert said.shown[-1] == "launcher/new: – → 0 of 10 lines (0.0 %)"


def test_one_part_that_lost_something_makes_all_fail(root):
    kept, lost = compare_mutants(BEFORE, after(), root), compare_mutants(BEFORE, after(**{PLUS: SURVIVED}), root)
    assert all_of([kept, lost]).exit_code == 1
    assert all_of([kept, kept]).exit_code == 0


TESTS = '''
async def test_one():
    """A run was
    lost."""

def test_two():
    """Another   way."""

def test_three():
    pass

def helper():
    """Not of a test."""
'''


def test_a_defect_is_named_by_the_docstring_of_a_test_or_by_a_scenario_and_may_become_a_row_of_a_table(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text(TESTS)
    found = named_defects(tests)
    assert found == {"tests/test_a.py::test_one": "A run was lost.", "tests/test_a.py::test_two": "Another way."}
    assert no_longer_there(found, tests) == []
    (tests / "scenarios.py").write_text('ROWS = (Scenario(befalls=a_kill, stands_for="A run was\\n" " lost."),)\n')
    assert named_defects(tests)["tests/scenarios.py::a_kill"] == "A run was lost."
    (tests / "scenarios.py").unlink()
    (tests / "test_a.py").write_text('ROWS = [(1, "A run was "\n    "lost.")]\n')
    assert no_longer_there(found, tests) == ["tests/test_a.py::test_two"]


def test_the_drawn_are_always_the_same_and_at_most_forty():
    source = "\n".join(f"def f{number}(a):\n    return a > {number}" for number in range(40))
    names = drawn("launcher/m.py", source)
    assert names == drawn("launcher/m.py", source)
    assert len({*names}) == 40
    assert drawn("launcher/m.py", SOURCE) == names_of(SOURCE)


def test_what_noticed_is_a_test_s_name():
    assert killer_of(f"{LATE}{KILLER}") == killer_of(KILLER) == KILLER
    assert not names_a_test(SURVIVED)
    assert not names_a_test(UNTESTED)


def test_a_measurement_goes_on_where_it_ended_and_forgets_a_module_that_changed(root, monkeypatch):
    monkeypatch.chdir(root)
    results = root / "results"
    results.mkdir()
    command.write_results(results, "launcher/m.py", {GREATER: KILLER})
    command.write_results(results, "launcher/m.py", {PLUS: SURVIVED})
    assert command.read_results(results, "launcher/m.py") == {GREATER: KILLER, PLUS: SURVIVED}
    (root / "launcher" / "m.py").write_text(f"{SOURCE}\n")
    assert command.read_results(results, "launcher/m.py") == {}


def test_only_what_was_noticed_and_is_still_there_is_tried_again(root, monkeypatch):
    monkeypatch.chdir(root)
    before = {**BEFORE["launcher/m.py"], "gone: a → b": KILLER}
    assert [*command.wanted_of("launcher/m.py", before, anew=False)] == [GREATER, LESS, PLUS]
    assert {*command.wanted_of("launcher/m.py", before, anew=True)} == {*names_of(SOURCE)}


def test_a_mutant_stays_the_same_while_its_code_is_there_and_another_is_drawn_for_each_that_is_gone(root, monkeypatch):
    """A module that changed anywhere was drawn anew, and nobody saw whether what had been noticed still was."""
    monkeypatch.chdir(root)
    lines = [f"    if a == {number}:\n        return a > {number}\n" for number in range(40)]
    (root / "launcher" / "m.py").write_text("def f(a):\n" + "".join(lines))
    drawn_first = drawn("launcher/m.py", (root / "launcher" / "m.py").read_text())
    before = dict.fromkeys(drawn_first, KILLER)
    (root / "launcher" / "m.py").write_text("def f(a):\n" + "".join(lines[:-3]))
    there = {*names_of((root / "launcher" / "m.py").read_text())}
    wanted = command.wanted_of("launcher/m.py", before, anew=True)
    assert len(wanted) == len(before)
    assert {*wanted} >= {*before} & there
    assert {name for name, was in wanted.items() if was == ""} == {*wanted} - {*before} != set()


def test_what_was_measured_of_one_module_is_kept_and_the_rest_of_the_base_line_stays(root, monkeypatch):
    monkeypatch.chdir(root)
    (root / "launcher" / "n.py").write_text(SOURCE)
    (root / "mutants.json").write_text(
        json.dumps({"commit": "a", "unfinished": {}, "modules": {**BEFORE, "launcher/n.py": {PLUS: KILLER}}})
    )
    monkeypatch.setattr(command, "MUTANTS", root / "mutants.json")
    monkeypatch.setattr(command, "in_turn", lambda: ("launcher/n.py", "launcher/m.py"))
    monkeypatch.setattr(command, "_write_rows", None)  # no coverage was measured
    (root / "launcher" / "m.py").write_text(SOURCE.replace("a > 0", "a > 1"))
    results = root / "results"
    results.mkdir()
    now = "f: a > 1 → a >= 1"
    command.write_results(results, "launcher/m.py", {now: KILLER, PLUS: SURVIVED})
    command.keep(results, ["launcher/m.py"])
    kept = json.loads((root / "mutants.json").read_text())
    assert kept["modules"]["launcher/n.py"] == {PLUS: KILLER}
    assert kept["modules"]["launcher/m.py"] == {now: KILLER, PLUS: SURVIVED, "C.g: 1 → 2": SURVIVED}
    assert kept["unfinished"] == {"launcher/m.py": "3 of 5", "launcher/n.py": "1 of 5"}
    assert kept["commit"] == "a"


def test_the_tests_are_collected_in_the_process_that_has_imported_what_tries_the_mutants():
    """Pytest warned of a plugin that was imported before it, warnings had become errors, and nothing was measured."""
    collects = "pytest.main([*trials.OPTIONS, '--collect-only', '-q', 'tests/mutation/baseline/test_baseline.py'])"
    script = f"import sys, pytest; from tests.mutation.baseline import trials; sys.exit({collects})"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_committed_base_line_is_readable_and_small():
    files = (command.MUTANTS, command.COVERAGE, command.DEFECTS)
    assert sum(file.stat().st_size for file in files) < 2**20
    measured = json.loads(command.MUTANTS.read_text())
    assert {*measured["modules"]} | {*measured["unfinished"]} == {*in_turn()}
    assert [path for path in in_turn() if not (REPOSITORY / path).is_file()] == []
    named = (*measured["modules"], *measured["unfinished"])  # of a room that was written anew, none is measured yet
    assert {path.rpartition("/")[0] for path in named} == {*CHOSEN}, "each room is represented"
    assert [*measured["modules"]] == sorted(measured["modules"])
    assert json.loads(command.COVERAGE.read_text())["commit"] == measured["commit"]
