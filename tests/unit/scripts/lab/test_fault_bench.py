"""The benchmark's own test: what a no-op raises, and what a switched-off detector must miss. Its table."""

import json

import pytest

from launcher.config.compose import REPOSITORY, compose
from launcher.config.supervision_checks import find_contradictions
from scripts.lab import fault_bench
from scripts.lab.cells import BROKEN, RUN, Cell, CellResult, Mark, MarkRole, Workplace, verdict
from scripts.lab.fault_bench import CELLS, main
from scripts.lab.fault_table import markdown, unbelievable, write_results

BY_NAME = {cell.name: cell for cell in CELLS}
QUIET = {
    "finished": [1.0],
    "steps": [40.0],
    "alarms": [0.0],
    "ledger_violations": [0.0],
    "stale_steps": [0.0],
    "zero_reward_steps": [0.0],
}
BLIND = {"stale_steps": [1.0], "zero_reward_steps": [6.0], "hangs_unnoticed": [1.0]}
"""Without the three detectors: a step on old weights, six on rewards of 0, a hang that nobody saw."""


def result(name, measures, status=RUN, reason=""):
    cell = BY_NAME[name]
    verdicts = tuple(verdict(mark, measures) for mark in cell.marks)
    return CellResult(
        name=name, arm=cell.arm, how=cell.how, status=status, reason=reason, measures=measures, verdicts=verdicts
    )


def test_a_no_op_that_raises_no_alarm_and_detectors_off_that_miss_their_faults_are_believed():
    assert unbelievable([result("noop", QUIET), result("detectors_off", BLIND)]) == []


def test_an_alarm_without_a_fault_makes_the_benchmark_fail_and_names_the_cell():
    (problem,) = unbelievable([result("noop", {**QUIET, "alarms": [2.0]})])
    assert problem == "cell noop: nothing was injected, and alarms is 2"


@pytest.mark.parametrize(
    ("measure", "detector"),
    [
        ("stale_steps", "gate.distance_float32"),
        ("zero_reward_steps", "gate.canaries"),
        ("hangs_unnoticed", "health.stopped_s and silence_s"),
    ],
)
def test_each_detector_that_is_off_and_misses_nothing_makes_the_benchmark_fail(measure, detector):
    (problem,) = unbelievable([result("detectors_off", {**BLIND, measure: [0.0]})])
    assert problem.startswith(f"cell detectors_off: with {detector} switched off, {measure} still meets")


def test_detectors_that_are_off_prove_nothing_about_a_fault_that_did_not_come_about():
    (problem,) = unbelievable([result("detectors_off", {**BLIND, "faults_missed": [1.0]})])
    assert problem == "cell detectors_off: 1 of its faults did not come about"


def test_what_was_not_measured_proves_nothing():
    (problem,) = unbelievable([result("noop", {**QUIET, "alarms": []})])
    assert problem == "cell noop has no point of alarms"
    assert "| noop | alarms | – | sum ≤ 0 | not measured |" in markdown({}, [result("noop", {**QUIET, "alarms": []})])


def test_a_missed_mark_of_ours_is_a_result_and_a_broken_cell_is_none():
    slow = result("storm", {"semantic_ettr": [0.5], "faults": [5.0]})
    assert unbelievable([slow]) == []
    assert "| storm | semantic_ettr | 0.5 | median ≥ 0.9 | missed |" in markdown({}, [slow])
    assert unbelievable([result("traps", {}, BROKEN, "no step")]) == ["cell traps broke: no step"]


def test_the_table_says_whether_ours_is_ahead_of_the_best_other_arm():
    shares = {"storm": 0.8, "resume": 0.5, "by_hand": 0.2}
    arms = [result(name, {"semantic_ettr": [share]}) for name, share in shares.items()]
    assert "storm is ahead of resume: 0.80 against 0.50" in markdown({}, arms)
    worse = [result("storm", {"semantic_ettr": [0.4]}), *arms[1:]]
    assert "storm is NOT ahead of resume: 0.40 against 0.50" in markdown({}, worse)
    assert "ahead" not in markdown({}, arms[:1])


def test_what_was_checked_of_the_ledger_is_told():
    found = {**QUIET, "steps": [60.0], "run_steps": [60.0], "prompt_uses": [6.0] * 160}
    said = "- storm: ledger: 160 prompts, each exactly 6 times; 60 of 60 steps"
    assert said in markdown({}, [result("storm", found)])
    assert "- noop: ledger: " not in markdown({}, [result("noop", QUIET)])


def test_what_each_fault_cost_is_below_the_table():
    table = markdown(
        {}, [result("storm", {"semantic_ettr": [0.8], "lost_steps C1": [0.25, 4.0], "lost_steps S1": [6.0]})]
    )
    assert "- storm: usual steps lost from each fault to the next: C1 0.2, 4.0; S1 6.0" in table


def test_a_zero_has_its_bound():
    table = markdown({}, [result("noop", QUIET)])
    assert "| noop | alarms | 0 of 40 (at most 7.5%) | sum ≤ 0 | met |" in table


def cell(name, measures, expected_s=1.0, marks=()):
    def run(place):
        if measures is None:
            raise RuntimeError("the run took 0 of 1 steps\n see console.log")
        return measures

    return Cell(name=name, arm="ours", how="made", run=run, expected_s=expected_s, marks=marks)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command with made cells in place of the real ones; its exit code, and what it left."""

    def run(*cells):
        monkeypatch.setattr(fault_bench, "CELLS", cells)
        code = main(["--minutes", "1", "--output", str(tmp_path / "made")])
        return code, json.loads((tmp_path / "made" / "results.json").read_text())["cells"]

    return run


def test_a_cell_that_breaks_ends_no_other_and_the_command_with_1(command, capsys):
    mark = Mark(measure="x", limit=2, how="worst")
    code, (broken, whole) = command(cell("a", None), cell("b", {"x": [1.0, 3.0]}, marks=(mark,)))
    assert code == 1
    assert (broken["status"], broken["reason"]) == (BROKEN, "RuntimeError: the run took 0 of 1 steps see console.log")
    assert (whole["status"], whole["verdicts"][0]["figure"], whole["verdicts"][0]["is_met"]) == (RUN, 3.0, False)
    assert "not to be believed: cell a broke" in capsys.readouterr().err


def test_a_cell_that_does_not_fit_is_said_to_be_not_run_and_nothing_is_guessed(command, capsys):
    code, (_, late) = command(cell("a", {"x": [1.0]}), cell("b", {"x": [1.0]}, expected_s=100.0))
    assert (code, late["status"], late["measures"]) == (0, "not run", {})
    assert "- b: not run, it needs about 100 s, 60 s were left" in capsys.readouterr().out


def test_a_folder_holds_raw_points_and_a_table(tmp_path):
    storm = result("storm", {"ettr": [0.8], "semantic_ettr": [0.7], "next_step_s": [1.0, 9.0], "faults": [2.0]})
    write_results(tmp_path, {"command": "c"}, [storm, result("noop", QUIET)])
    content = json.loads((tmp_path / "results.json").read_text())
    assert (content["command"], content["problems"], len(content["cells"])) == ("c", [], 2)
    assert content["cells"][0]["measures"]["next_step_s"] == [1.0, 9.0]
    assert (
        "| storm | ours | 2 of 2 | 80 % | 70 % | – | – | – | 5.0 s (≤ 9.0, 2×) | 0 |"
        in (tmp_path / "results.md").read_text()
    )


def test_the_pace_is_that_of_the_no_op_before_and_each_cell_has_a_folder_of_its_own(command, tmp_path):
    seen = {}

    def cell_that_looks(name):
        def run(place):
            seen[name] = place
            return {"usual_step_s": [0.5]}

        return Cell(name=name, arm="ours", how="made", run=run, expected_s=1.0)

    command(cell_that_looks("noop"), cell_that_looks("storm"))
    assert seen["storm"].folder == tmp_path / "made" / "runs" / "storm"
    assert [(one.name, one.measures) for one in seen["storm"].before] == [("noop", {"usual_step_s": [0.5]})]


def test_every_cell_is_on_its_page_and_has_a_name_of_its_own():
    page = (REPOSITORY / "docs" / "measurements.md").read_text()
    assert len(BY_NAME) == len(CELLS)
    assert [cell.name for cell in CELLS if f"`{cell.name}`" not in page] == []
    assert {mark.detector for cell in CELLS for mark in cell.marks if mark.role is MarkRole.MUST_MISS} == {
        "gate.distance_float32",
        "gate.canaries",
        "health.stopped_s and silence_s",
    }


class Asked(Exception):
    """The settings that a cell would run with."""


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_settings_of_a_cell_contradict_nothing(cell, tmp_path, monkeypatch):
    words = fault_bench.words_of

    def asked_for(*given):
        raise Asked(*words(*given))

    monkeypatch.setattr(fault_bench, "words_of", asked_for)
    with pytest.raises(Asked) as asked:
        cell.run(Workplace(folder=tmp_path))
    assert list(find_contradictions(compose(list(asked.value.args)))) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cells", "storm,nope"], "--cells nope: no such name"),
        (["--minutes", "0.1"], "--minutes 0.1: no cell fits"),
        (["--output", "{full}"], "is not an empty folder"),
    ],
)
def test_a_wrong_command_is_one_message_and_nothing_is_begun(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main([word.format(full=tmp_path / "full") for word in words]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("error:") == 1
    assert not (tmp_path / "fault_bench").exists()
