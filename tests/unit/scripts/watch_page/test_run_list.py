"""The runs below a folder that several users share."""

import os
import tempfile
from pathlib import Path

import pytest

from launcher.run_files.run_paths import RunPaths
from scripts.run_processes import live_runs
from scripts.watch_page.run_list import list_runs


@pytest.fixture
def shared():
    """A folder below folders that everybody may pass: those of pytest are closed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not look into a folder")
@pytest.mark.parametrize(("closed", "mode"), [("logs/other/e/t", 0o700), ("logs/other/e", 0o744)])
def test_a_folder_that_another_user_has_closed_hides_no_other_run(shared, closed, mode):
    """Every tool that looks for runs ended with its PermissionError."""
    for user in ("me", "other"):
        paths = RunPaths(fileroot=shared, user=user, experiment_name="e", trial_name="t")
        paths.logs.mkdir(parents=True)
        paths.events.touch()
    (shared / closed).chmod(mode)
    os.seteuid(65534)
    try:
        assert [one["run"] for one in list_runs(shared)] == ["me/e/t"]
        assert live_runs(shared) == []
    finally:
        os.seteuid(0)
