"""The runs below a folder that several users share."""

import os

import pytest

from launcher.run_files.run_paths import RunPaths
from scripts.run_processes import live_runs
from scripts.watch_page.run_list import list_runs


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not look into a folder")
@pytest.mark.parametrize(("closed", "mode"), [("logs/other/e/t", 0o700), ("logs/other/e", 0o744)])
def test_a_folder_that_another_user_has_closed_hides_no_other_run(tmp_path, closed, mode):
    """Every tool that looks for runs ended with its PermissionError."""
    root = tmp_path / "shared"
    for user in ("me", "other"):
        paths = RunPaths(fileroot=root, user=user, experiment_name="e", trial_name="t")
        paths.logs.mkdir(parents=True)
        paths.events.touch()
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (root / closed).chmod(mode)
    os.seteuid(65534)
    try:
        assert [one["run"] for one in list_runs(root)] == ["me/e/t"]
        assert live_runs(root) == []
    finally:
        os.seteuid(0)
