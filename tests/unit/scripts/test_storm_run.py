"""The run that a storm starts: where it is, and what it writes."""

import shutil

import pytest

from launcher.config.compose import REPOSITORY, compose
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.started_run import started
from scripts.storm import read_result, table
from tests.support.made_ledger import MadeRun


@pytest.mark.slow
def test_the_run_reads_paths_from_the_folder_in_which_the_storm_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / "assets" / "arithmetic" / "test.jsonl", "mine.jsonl")
    words = ["conf=arithmetic_cpu", f"cluster.fileroot={tmp_path / 'storm'}", "train_dataset.path=mine.jsonl"]
    paths = RunPaths.of(compose(words))
    with started([*words, "dry_run=true"], paths) as process:
        assert process.wait(120) == 0
    said = (tmp_path / "storm" / "console.log").read_text()
    assert "plan of arithmetic_cpu/trial0" in said
    assert not [line for line in said.splitlines() if line.startswith("missing here") and "mine.jsonl" in line]


@pytest.mark.parametrize(("allowed", "stale"), [(0, 1), (1, 0)])
def test_tokens_of_older_weights_are_stale_where_the_run_does_not_allow_them(tmp_path, allowed, stale):
    run = finished(tmp_path, 20)
    settings = run.paths.config.read_text().replace("max_head_offpolicyness: 0", f"max_head_offpolicyness: {allowed}")
    run.paths.config.write_text(settings)
    run.change(
        run.paths.ledger,
        lambda lines: [line | {"weight_versions": [3]} if n == 4 else line for n, line in enumerate(lines)],
    )
    found = read_result(run.paths, seed=1, asked=0, exit_code=0, seconds=1.0)
    assert (found.audit.stale_steps, found.survived) == (stale, not stale)


def test_the_verdict_says_what_was_checked(tmp_path):
    run = finished(tmp_path, 30)
    result = read_result(run.paths, seed=1, asked=0, exit_code=0, seconds=1.0)
    assert result.survived
    assert "FINISHED, nothing lost, doubled or stale in its ledger: " in table(result)
    assert "ledger: 160 prompts, each exactly 3 times; 30 of 30 steps; 0 undone, " in table(result)


def test_a_storm_of_which_something_is_lost_or_not_known_was_not_survived(tmp_path):
    run = finished(tmp_path, 30)
    shutil.rmtree(run.paths.default_checkpoints)
    result = read_result(run.paths, seed=1, asked=0, exit_code=0, seconds=1.0)
    assert not result.survived
    assert "\n  not known: whether steps or prompts are missing" in table(result)
    run = finished(tmp_path / "another", 30)
    run.change(run.paths.ledger, lambda lines: lines[:-1])
    result = read_result(run.paths, seed=1, asked=0, exit_code=0, seconds=1.0)
    assert not result.survived
    assert "\n  29 of the run's 30 steps\n" in table(result)


def finished(root, steps):
    run = MadeRun(root, total_steps=steps)
    run.take_steps(steps)
    run.finish()
    return run


def test_a_fault_of_the_trainer_is_not_counted_as_a_server_that_never_served_again(tmp_path):
    said = _said_of(finished(tmp_path, 10), ("T1", "trainer"), ("C1", "server-0"))
    assert "a server serves again: median 1.0 s, at most 1.0 s (1 of 1)" in said


def test_an_event_without_a_name_ends_no_storm(tmp_path):
    """TypeError: unhashable type, and the table of a storm of an hour was lost."""
    run = finished(tmp_path, 10)
    for name in (["server.died"], {"of": "another program"}, None):
        append_line(run.paths.events, {"event": name, "monotonic": 1.5, "time": 1.5})
    assert "not noticed: C5 of server-1 before" in _said_of(run, ("C5", "server-1"))


def test_what_nobody_noticed_is_told_beside_the_verdict(tmp_path):
    said = _said_of(finished(tmp_path, 10), ("C5", "server-1"))
    assert "FINISHED, nothing lost, doubled or stale in its ledger: " in said
    assert "not noticed: C5 of server-1 before the first step; what it did to the run is not known" in said


def _said_of(run, *faults):
    FaultPaths(run.paths).record.parent.mkdir(parents=True)
    for at, (kind, target) in enumerate(faults):
        fired = {"what": "fired", "kind": kind, "target": target, "monotonic": at + 1.0}
        append_line(FaultPaths(run.paths).record, fired)
    append_line(run.paths.events, {"time": 3.0, "monotonic": 3.0, "event": "server.ready", "subject": "server-0"})
    return table(read_result(run.paths, seed=1, asked=len(faults), exit_code=0, seconds=1.0))
