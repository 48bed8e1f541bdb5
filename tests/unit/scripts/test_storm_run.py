"""The run that a storm starts: where it is, and what it writes."""

import shutil

import pytest

from launcher.config.compose import REPOSITORY, compose
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.started_run import started
from scripts.storm import read_result, table


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
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    (paths.logs / "config.yaml").write_text(f"rollout:\n  max_head_offpolicyness: {allowed}\n")
    append_line(paths.events, {"time": 1.0, "event": "trainer.started", "attempt": 1, "prompts": 2})
    for step, prompt in enumerate("ab"):
        append_line(paths.metrics, {"time": 2.0 + step, "global_step": step, "attempt": 1})
        line = {"global_step": step, "attempt": 1, "prompt_ids": [prompt], "weight_versions": [0]}
        append_line(paths.ledger, line)
    found = read_result(paths, seed=1, asked=0, exit_code=0, seconds=1.0)
    assert (found.audit.stale_steps, found.survived) == (stale, not stale)


def test_a_fault_of_the_trainer_is_not_counted_as_a_server_that_never_served_again(tmp_path):
    said = _said_of(tmp_path, ("T1", "trainer"), ("C1", "server-0"))
    assert "a server serves again: median 1.0 s, at most 1.0 s (1 of 1)" in said


def test_what_nobody_noticed_is_told_beside_the_verdict(tmp_path):
    said = _said_of(tmp_path, ("C5", "server-1"))
    assert "FINISHED, nothing lost, doubled or stale in its ledger: " in said
    assert "not noticed: C5 of server-1 before the first step; what it did to the run is not known" in said


def _said_of(tmp_path, *faults):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    FaultPaths(paths).record.parent.mkdir(parents=True)
    (paths.logs / "config.yaml").write_text("rollout:\n  max_head_offpolicyness: 0\n")
    for at, (kind, target) in enumerate(faults):
        append_line(FaultPaths(paths).record, {"what": "fired", "kind": kind, "target": target, "monotonic": at + 1.0})
    append_line(paths.events, {"time": 1.0, "event": "trainer.started", "attempt": 1, "prompts": 1})
    append_line(paths.events, {"time": 3.0, "monotonic": 3.0, "event": "server.ready", "subject": "server-0"})
    append_line(paths.metrics, {"time": 2.0, "global_step": 0, "attempt": 1})
    append_line(paths.ledger, {"global_step": 0, "attempt": 1, "prompt_ids": ["a"], "weight_versions": [0]})
    return table(read_result(paths, seed=1, asked=len(faults), exit_code=0, seconds=1.0))
