"""What is kept of an incident: from living and dead processes, bounded, and never at the run's cost."""

import asyncio
import json
import subprocess
import sys

import pytest

from actors.processes.process_tree import identify
from actors.supervision import incident_artifacts
from actors.supervision.incident_artifacts import collect
from tests.support.worlds.supervision import SLEEPER
from tests.support.worlds.supervision import patience as patience


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def gather(paths, number=1, **more):
    given = {"facts": {"cause": "server_hang"}, "logs": {}, "pids": {}} | more
    return asyncio.run(collect(paths, number, **given))


@pytest.mark.usefixtures("patience")
def test_a_folder_holds_logs_stacks_and_memory(paths, sleeper):
    paths.server_log(0).write_text("first\n" * 100_000 + "the last line\n")
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder = gather(
        paths,
        logs={"server-0": paths.server_log(0)},
        pids={"trainer": sleeper.pid, "gone": gone.pid},
        stacks_of={"trainer": sleeper.pid, "gone": gone.pid},
    )
    assert folder == paths.incident(1)
    assert json.loads((folder / "incident.json").read_text()) == {"cause": "server_hang"}
    kept = (folder / "server-0.log.tail").read_text()
    assert kept.endswith("the last line\n")
    assert len(kept) <= incident_artifacts.MOST_LOG_BYTES
    assert "waits_for_nothing" in (folder / "stacks" / "trainer.txt").read_text()
    assert (folder / "stacks" / "gone.txt").stat().st_size  # says why there is none
    memory = json.loads((folder / "memory.json").read_text())
    assert memory["processes"]["trainer"]["rss"] > 2**20
    assert memory["processes"]["gone"] == {"pid": gone.pid, "error": "NoSuchProcess"}
    assert not (folder / "missing.txt").exists()


def test_a_dump_that_hangs_is_ended_and_the_rest_is_there(paths, sleeper, tmp_path, monkeypatch):
    hanging = tmp_path / "py-spy"
    hanging.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(incident_artifacts, "PY_SPY", hanging)
    monkeypatch.setattr(incident_artifacts, "DUMP_TIMEOUT_S", 0.5)
    folder = gather(paths, stacks_of={"trainer": sleeper.pid})
    assert "did not answer" in (folder / "stacks" / "trainer.txt").read_text()
    assert (folder / "memory.json").exists()
    pid = tmp_path / "pid"  # not there where it was ended before its first line
    assert [one.read_text() for one in (pid,) if one.exists() and is_alive(one.read_text())] == []


def is_alive(pid):
    return bool(pid.strip()) and identify(int(pid)) is not None


def test_without_py_spy_the_reason_stands_in_the_place_of_the_stack(paths, sleeper, monkeypatch, tmp_path):
    monkeypatch.setattr(incident_artifacts, "PY_SPY", tmp_path / "nowhere")
    folder = gather(paths, stacks_of={"trainer": sleeper.pid})
    assert "nowhere" in (folder / "stacks" / "trainer.txt").read_text()


def test_what_can_not_be_gathered_is_said_and_costs_nothing_else(paths, monkeypatch):
    def broken(*_):
        raise RuntimeError("no NVML today")

    monkeypatch.setattr(incident_artifacts, "find_hardware", broken)
    folder = gather(paths)
    assert "memory: RuntimeError: no NVML today" in (folder / "missing.txt").read_text()
    assert (folder / "incident.json").exists()


def test_where_no_folder_can_be_made_there_is_none_and_no_error(paths, monkeypatch):
    paths.incidents.write_text("a file in its place")
    assert gather(paths) is None
    paths.incidents.unlink()
    monkeypatch.setattr(incident_artifacts, "MOST_FOLDERS", 2)
    assert [gather(paths, number) is not None for number in (1, 2, 3)] == [True, True, False]


def test_what_a_killed_coordinator_had_not_gathered_is_added_and_what_stands_is_left(paths):
    paths.server_log(0).write_text("the old life\n")
    first = gather(paths)
    kept = (first / "memory.json").read_bytes()
    folder = gather(paths, facts={"cause": "another"}, logs={"server-0": paths.server_log(0)})
    assert json.loads((folder / "incident.json").read_text()) == {"cause": "server_hang"}
    assert (folder / "memory.json").read_bytes() == kept
    assert (folder / "server-0.log.tail").read_text() == "the old life\n"


def test_a_folder_that_stands_is_filled_though_there_are_too_many(paths, monkeypatch):
    gather(paths)
    monkeypatch.setattr(incident_artifacts, "MOST_FOLDERS", 1)
    assert gather(paths) == paths.incident(1)
