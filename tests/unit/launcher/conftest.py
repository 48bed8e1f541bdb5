"""The folders of a run that has written nothing yet."""

import pytest

from launcher.run_files.run_paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    return paths
