"""The watch page beside a driver, with its real process: its link, its end, and that its death ends nothing."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from actors.processes.process_tree import identify, wait_ended
from launcher.__main__ import main as launch
from launcher.base.addresses import free_port
from launcher.cli.watch_process import WatchProcess
from launcher.config.compose import REPOSITORY
from launcher.run_files.run_keys import read_watch_token
from launcher.run_files.run_paths import RunPaths
from tests.support.long_run import LongRun

WAIT_S = 120


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(fileroot=tmp_path, user="ann", experiment_name="long", trial_name="t")
    LongRun(made, steps=60, incidents=2).write()
    return made


@pytest.fixture
def port():
    return free_port()


def answers(port, token):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/runs", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as said:
        return [one["run"] for one in json.load(said)["runs"]]


def test_its_link_is_said_and_it_ends_with_the_driver(paths, port):
    said = queue.Queue()
    page = WatchProcess(port, paths, said.put, is_attended=True)
    token = read_watch_token(paths.keys)
    assert said.get(timeout=WAIT_S) == f"watch it: http://127.0.0.1:{port}/#token={token}&run=ann/long/t"
    assert answers(port, token) == ["ann/long/t"]
    page.close()
    with pytest.raises(OSError):
        answers(port, token)
    page.close()
    assert said.empty()


@pytest.mark.slow
def test_where_others_may_read_it_the_link_has_no_token_and_a_later_attempt_has_the_same(paths, port):
    said = queue.Queue()
    for _ in range(2):
        page = WatchProcess(port, paths, said.put, is_attended=False)
        line = said.get(timeout=WAIT_S)
        token = read_watch_token(paths.keys)
        assert line.startswith(f"watch it: http://127.0.0.1:{port}/ (its token is in {paths.keys}")
        assert token not in line
        assert answers(port, token)
        page.close()


@pytest.mark.slow
def test_its_death_is_said_once_and_ends_nothing(paths, port):
    said = queue.Queue()
    page = WatchProcess(port, paths, said.put, is_attended=True)
    said.get(timeout=WAIT_S)
    os.kill(page._process.pid, signal.SIGKILL)
    assert said.get(timeout=WAIT_S) == "the watch page has ended, with code -9; the run continues"
    page.close()


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_message(paths, port):
    said = queue.Queue()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        page = WatchProcess(port, paths, said.put, is_attended=True)
        line = said.get(timeout=WAIT_S)
        page.close()
    assert line.splitlines()[:2] == [
        "the watch page has ended, with code 2; the run continues",
        f"error: port {port} of 127.0.0.1 is taken",
    ]
    assert "watch.port" in line
    assert said.empty()


def test_keys_that_can_not_be_written_are_one_message(paths, port):
    paths.keys.parent.mkdir(parents=True, exist_ok=True)
    paths.keys.write_text("a file where the folder should be")
    said = queue.Queue()
    WatchProcess(port, paths, said.put, is_attended=True).close()
    assert said.get(timeout=WAIT_S).startswith("the watch page could not be started: ")


DRIVER = """
import sys, time
from pathlib import Path
from launcher.__main__ import main as launch
from launcher.cli.watch_process import WatchProcess
from launcher.run_files.run_paths import RunPaths
paths = RunPaths(fileroot=Path(sys.argv[1]), user="ann", experiment_name="long", trial_name="t")
page = WatchProcess(int(sys.argv[2]), paths, lambda line: print(page._process.pid, line, flush=True), is_attended=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_it_ends_when_its_driver_is_killed(paths, port):
    command = [sys.executable, "-c", DRIVER, str(paths.fileroot), str(port)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as driver:
        page = identify(int(driver.stdout.readline().split()[0]))
        assert page is not None
        driver.kill()
        driver.wait()
    assert wait_ended([page], WAIT_S)


@pytest.mark.slow
def test_the_plan_names_the_page(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launcher", "conf=arithmetic_cpu", "dry_run=true", "watch.port=8765"])
    launch()
    assert "on port 8765 of its driver's loopback (watch.port)" in capsys.readouterr().out
