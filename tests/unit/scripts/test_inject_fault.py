"""The injector's command: it finds the run's processes, leaves alone who recovers, and says what is missing."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from actors.processes.process_tree import identify
from launcher.run_files.journal import append_line
from scripts.faults.fault_paths import FaultPaths
from scripts.inject_fault import main
from scripts.run_processes import NotLive, find_driver, find_run, live_runs, state, title
from tests.programs.fake_run import SLEEP
from tests.support.fault_game import REPOSITORY, deadline_s, gone, wait_for_state

# ── finding ──


def listens(url):
    with socket.socket() as trial:
        host, _, port = url.removeprefix("http://").partition(":")
        return trial.connect_ex((host, int(port))) == 0


@pytest.mark.slow
def test_a_run_is_found_with_all_its_processes(game):
    found = find_run(game.paths)
    assert found.driver == game.driver
    assert title(found.trainer) == "ray::Trainer.run"
    assert set(found.supervisors) == {"health_monitor", "coordinator"}
    assert [server.index for server in found.servers] == [0, 1]
    for server in found.servers:
        assert listens(server.url)
        assert server.part("http") == (server.http,)
        assert len(server.part("tree")) == 3
        assert [title(p) for part in ("scheduler", "detokenizer") for p in server.part(part)] == [
            "sglang::scheduler",
            "sglang::detokenizer",
        ]
    assert live_runs(game.folder) == [game.paths]


@pytest.mark.slow
def test_a_stranger_of_the_same_title_is_not_the_run_s(game):
    stranger = subprocess.Popen(["ray::Trainer.run", "-S", "-c", SLEEP], executable=sys.executable)
    try:
        game.step()
        game.commit_checkpoint(0)
        os.kill(find_run(game.paths).trainer.pid, signal.SIGKILL)
        assert game.inject("T1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.slow
def test_a_pid_in_the_lock_that_is_another_process_by_now_is_no_driver(game, tmp_path):
    signed = json.loads(game.paths.lock.read_text())
    game.paths.lock.write_text(json.dumps(signed | {"pid": os.getpid()}))
    with pytest.raises(NotLive, match="is not running"):
        find_driver(game.paths)
    game.paths.lock.write_text(json.dumps(signed | {"host": "elsewhere"}))
    with pytest.raises(NotLive, match="runs on elsewhere"):
        find_driver(game.paths)
    game.paths.lock.write_text(json.dumps(signed))
    assert find_driver(game.paths) == game.driver


# ── who is left alone ──


@pytest.mark.slow
def test_nothing_happens_before_the_first_step(game):
    before = find_run(game.paths)
    assert game.inject("C1") == 1
    assert "not committed a step yet" in game.record()[-1]["reason"]
    assert find_run(game.paths) == before


@pytest.mark.slow
def test_a_role_that_has_not_stepped_since_the_last_fault_is_left_alone(game):
    game.step()
    assert game.inject("C1:server=0", "C1:server=1") == 1
    assert [line["what"] for line in game.record()] == ["begun", "fired", "missed"]
    assert "no step was committed since the last fault" in game.record()[-1]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("game", [1], indirect=True)
def test_a_server_that_is_not_ready_is_left_alone(game):
    game.step()
    append_line(game.paths.events, {"event": "server.died", "subject": "server-0", "attempt": 1})
    assert game.inject("C1") == 1
    assert "no server is READY" in game.record()[-1]["reason"]
    assert len(find_run(game.paths).servers) == 1


@pytest.mark.slow
@pytest.mark.parametrize("game", [1], indirect=True)
def test_keep_one_keeps_one(game):
    game.step()
    (server,) = find_run(game.paths).servers
    assert game.inject("C1", "--keep-one") == 2
    assert identify(server.http.pid) == server.http
    assert game.inject("C1:part=http", "--keep-one", "--even-the-last") == 0
    assert gone([server.http.pid])


@pytest.mark.slow
def test_a_step_is_waited_for(game):
    game.step(3)
    assert game.inject("C1:part=scheduler@2") == 0
    assert game.fired()["step"] == 2


# ── the command ──


@pytest.mark.slow
def test_a_dry_run_does_nothing_and_names_everybody(game, capsys):
    game.step()
    before = find_run(game.paths)
    assert game.inject("C7", "T1@30", "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"driver   pid {game.driver.pid}" in said
    assert "server-0 READY" in said
    assert "no complete checkpoint" in said
    assert find_run(game.paths) == before
    assert not FaultPaths(game.paths).root.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "no fault was named"),
        (["S4"], "can't be injected"),
        (["--storm", "C1x3"], "--steps"),
        (["C1", "--run", "game"], "names no run"),
        (["C1", "--run", "game/night"], "game/night"),
        (["S1"], "config.yaml"),
        (["N2"], "no raylet"),
    ],
)
def test_a_wrong_command_says_what_is_missing_and_does_nothing(game, words, named, capsys):
    game.step()
    before = find_run(game.paths)
    assert game.inject(*words) == 2
    assert named in capsys.readouterr().err
    assert find_run(game.paths) == before
    assert game.record() == []


def test_without_a_live_run_there_is_nothing_to_break(tmp_path, capsys):
    assert main(["C1", "--fileroot", str(tmp_path)]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_injector_lets_go_of_what_it_holds(game):
    game.step()
    (scheduler,) = find_run(game.paths).servers[0].part("scheduler")
    injector = subprocess.Popen(
        [
            *(sys.executable, "-m", "scripts.inject_fault", "C2:part=scheduler,server=0,seconds=1000"),
            *("--fileroot", str(game.folder)),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "begun" in injector.stdout.readline()
    wait_for_state(scheduler, "T")
    injector.terminate()
    assert injector.wait(deadline_s()) == 130
    assert state(scheduler) in "SR"
