"""The command, with its real process: its link, its end, and one message for each thing that is wrong."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from launcher.config.compose import REPOSITORY
from launcher.run_files.run_keys import ServerKeys, make_watch_token, read_watch_token
from launcher.run_files.run_paths import RunPaths
from scripts import watch
from tests.support.long_run import LongRun
from tests.support.machine import scaled


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(fileroot=tmp_path, user="ann", experiment_name="long", trial_name="t")
    LongRun(made, steps=60, incidents=2).write()
    return made


def started(*words, **more):
    command = [sys.executable, "-m", "scripts.watch", *words]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def answer(link):
    url, _, token = link.strip().partition("#token=")
    request = urllib.request.Request(f"{url}runs", headers={"Authorization": f"Bearer {token.partition('&')[0]}"})
    with urllib.request.urlopen(request) as said:
        return json.load(said)


@pytest.mark.slow
def test_the_link_that_it_prints_opens_the_runs_and_ctrl_c_ends_it(paths):
    with started("--fileroot", str(paths.fileroot), "--run", "ann/long/t") as process:
        link = process.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{40,}&run=ann/long/t\n", link)
        assert [one["run"] for one in answer(link)["runs"]] == ["ann/long/t"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            answer(re.sub("token=.*", "token=wrong", link))
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(60)) == 0
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_with_a_driver_it_ends_when_that_is_gone_and_its_token_stays(paths):
    ServerKeys.make(paths.keys)
    make_watch_token(paths.keys)
    words = ["--fileroot", str(paths.fileroot), "--keys", str(paths.keys), "--with-driver"]
    with started(*words, stdin=subprocess.PIPE) as process:
        link = process.stdout.readline()
        assert link.strip().endswith(f"#token={read_watch_token(paths.keys)}")
        assert answer(link)["runs"]
        process.stdin.close()
        assert process.wait(scaled(60)) == 0
    assert oct((paths.keys / "watch_token").stat().st_mode)[-3:] == "600"


def test_a_port_that_is_taken(paths, capsys):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert watch.main(["--fileroot", str(paths.fileroot), "--port", str(port)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"port {port} of 127.0.0.1 is taken" in said.err
    assert "--port" in said.err
    assert len(said.err.splitlines()) == 2


@pytest.fixture(autouse=True)
def as_nice_as_before(monkeypatch):
    monkeypatch.setattr(watch.os, "nice", lambda by: by)


def test_keys_without_a_token(paths, capsys):
    assert watch.main(["--fileroot", str(paths.fileroot), "--keys", str(paths.keys)]) == 2
    assert "watch_token is not there" in capsys.readouterr().err
