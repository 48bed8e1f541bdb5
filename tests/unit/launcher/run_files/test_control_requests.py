"""What is asked of a run, in a file that only its user can write; one that can't be read asks nothing."""

import pytest

from launcher.run_files.control_requests import FILE, ControlRequest, RequestEntry, ask, forget, wanted
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.prepare()
    ServerKeys.make(paths.keys)
    return paths


def test_a_new_start_wants_the_run_to_run(paths):
    ask(paths, RequestEntry(wish=ControlRequest.STOP, by="me"))
    assert oct((paths.keys / FILE).stat().st_mode & 0o777) == "0o600"
    assert wanted(paths) == RequestEntry(wish=ControlRequest.STOP, by="me")
    forget(paths)
    forget(paths)
    assert wanted(paths) is None


@pytest.mark.parametrize("content", ["", "[]", '{"wish": "fly", "by": "", "reason": ""}', "\0"])
def test_a_request_that_can_not_be_read_is_none(paths, content):
    (paths.keys / FILE).write_text(content)
    assert wanted(paths) is None


def test_a_link_in_the_place_of_a_request_is_not_followed(paths, tmp_path):
    other = tmp_path / "other"
    other.write_text('{"wish": "stop", "by": "", "reason": ""}')
    (paths.keys / FILE).symlink_to(other)
    assert wanted(paths) is None
