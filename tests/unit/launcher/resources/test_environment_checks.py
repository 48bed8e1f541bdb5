"""Variables and folders under which Ray or a server does not start: found before, each with its own remedy."""

import os
import socket
import tempfile

import pytest

from launcher.base.findings import Severity
from launcher.resources.environment_checks import OF_A_SERVER, OF_RAY, VARIABLES, check_temporary_folders
from launcher.resources.node_checks import check_node


@pytest.fixture
def folder(monkeypatch):
    """Make TMPDIR, or another variable, a folder whose path has so many bytes."""
    made = []
    base = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)

    def of_length(length: int, *, variable: str = "TMPDIR") -> str:
        path = f"{base}/{'é' * ((length - len(base) - 1) // 2)}"
        path += "a" * (length - len(os.fsencode(path)))
        os.mkdir(path)  # noqa: PTH102 - as long as it is
        made.append(path)
        monkeypatch.setenv(variable, path)
        monkeypatch.setattr(tempfile, "tempdir", None)
        return path

    yield of_length
    for path in [*made, base]:
        os.rmdir(path)  # noqa: PTH106


def stops():
    return {check.subject: check for check in check_temporary_folders() if check.stops}


ROOM = 107 - len(f"/grpo-ray-{os.geteuid()}/ray") - OF_RAY


@pytest.mark.parametrize(("length", "is_refused"), [(ROOM, False), (ROOM + 1, True), (110, True)])
def test_a_folder_too_long_for_rays_sockets_is_refused(folder, length, is_refused):
    path = folder(length)
    assert bool(stops()) is is_refused
    if is_refused:
        check = stops()["TMPDIR"]
        assert (check.level, path in check.text, "TMPDIR=/tmp" in check.hint) == (Severity.BAD, True, True)
        assert check in check_node()


def test_a_short_folder_of_rays_leaves_the_servers_sockets(folder, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    folder(107 - OF_A_SERVER)
    assert stops() == {}
    folder(107 - OF_A_SERVER + 1)
    assert stops().keys() == {"TMPDIR"}


@pytest.mark.parametrize("variable", ["TEMP", "TMP"])
def test_the_variable_that_names_the_folder_is_the_one_told(folder, monkeypatch, variable):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    folder(110, variable=variable)
    assert stops().keys() == {variable}


def test_a_folder_of_rays_that_is_not_there(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    assert stops()["RAY_TMPDIR"].text == "/nowhere is no folder that may be written"


@pytest.mark.parametrize("variable", ["TMPDIR", "TEMP", "TMP", "RAY_TMPDIR"])
@pytest.mark.parametrize("value", [".", "here", "./here/.."])
def test_a_relative_folder_is_another_one_in_each_process(tmp_path, monkeypatch, variable, value):
    """Ray's processes have a working folder of their own; the driver's may be too long for a socket besides."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for other in (*VARIABLES, "RAY_TMPDIR"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    (check,) = (one for one in check_temporary_folders() if one.stops)
    assert (check.subject, check.level) == (variable, Severity.BAD)
    assert check.text == f"{variable}={value} is a relative path: each process would take another folder"
    assert check.hint == f"set {variable} to an absolute path: {variable}=/tmp"


def test_a_relative_folder_that_another_variable_hides_stops_nothing(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setenv("TMP", ".")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert stops() == {}


def test_no_folder_takes_temporary_files(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert "No usable temporary directory" in stops()["TMPDIR"].text


def test_the_kernel_draws_the_line_there(folder):
    """107 bytes of a socket's path are taken, and 108 are not."""
    path = folder(95)
    for length, is_taken in ((107, True), (108, False)):
        file = f"{path}/{'s' * (length - len(os.fsencode(path)) - 1)}"
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.bind(file)
            except OSError:
                assert not is_taken
            else:
                assert is_taken
                os.unlink(file)  # noqa: PTH108
