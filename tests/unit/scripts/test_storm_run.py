"""The run that a storm starts: where it is, and what it writes."""

import shutil

import pytest

from launcher.config.compose import REPOSITORY, compose
from launcher.run_files.run_paths import RunPaths
from scripts.storm import started


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
