"""The run that a storm starts: where it is, and what it writes."""

import shutil

import pytest

from launcher.config.compose import REPOSITORY
from scripts.storm import _run


@pytest.mark.slow
def test_the_run_reads_paths_from_the_folder_in_which_the_storm_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / "assets" / "arithmetic" / "test.jsonl", "mine.jsonl")
    with _run(["conf=arithmetic_cpu", "train_dataset.path=mine.jsonl", "dry_run=true"], tmp_path / "storm") as process:
        assert process.wait(120) == 0
    said = (tmp_path / "storm" / "console.log").read_text()
    assert "plan of arithmetic_cpu/trial0" in said
    assert not [line for line in said.splitlines() if line.startswith("missing here") and "mine.jsonl" in line]
