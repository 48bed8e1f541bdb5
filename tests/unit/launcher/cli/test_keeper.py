"""The keeper begins a driver again that was killed or asks for it, passes signals on, and ends the run where none may
follow. With real processes; the driver is a stand-in."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from actors.processes.process_tree import children, descendants, identify, send
from launcher.base.exit_codes import AGAIN
from launcher.base.messages import Cause
from launcher.cli import keeper
from launcher.cli.keeper import TASK, DriverTask, KeeperTask
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.config.supervision import RestartConfig
from launcher.policy.next_attempt import KeptRun
from launcher.run_files.journal import append_line, read_lines
from launcher.run_files.run_memory import RunMemory, memory_file
from launcher.run_files.run_paths import RunLock, RunPaths
from launcher.run_files.written_settings import read_config, write_settings
from scripts.run_processes import NotLive, find_driver, is_live
from tests.support.machine import scaled, wait_until

DRIVER = """
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
number = len(list(folder.glob("begun-*")))
heard = []
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(one, lambda got, frame: heard.append(got))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
sleeps = [sys.executable, "-c", "import time; time.sleep(1000)"]
left = subprocess.Popen(sleeps, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
facts = {"pid": os.getpid(), "group": os.getpgrp(), "left": left.pid, "task": json.loads(sys.argv[-1])}
(folder / "new").write_text(json.dumps(facts))
(folder / "new").rename(folder / f"begun-{number}")
while not heard:
    if (folder / f"again-{number}").exists():
        sys.exit(76)
    time.sleep(0.01)
(folder / "heard").write_text(signal.Signals(heard[0]).name)
while (folder / "saves").exists():
    time.sleep(0.01)
sys.exit(int(sys.argv[2]))
"""


class Kept:
    """A keeper over a stand-in for the driver, which ends with `code` when it gets a signal."""

    def __init__(self, folder, *, code=0, prefix=(), **restart):
        self.folder = folder
        config = RunConfig(experiment_name="kept", train_dataset=DatasetConfig(path="none"))
        config.cluster.fileroot = str(folder / "root")
        self.paths = RunPaths.of(config)
        self.paths.prepare()
        write_settings(config, self.paths.settings)
        append_line(self.paths.events, {"event": "run.started", "attempt": 4})
        lock = RunLock(self.paths)
        task = DriverTask(
            logs=str(self.paths.logs),
            words=["conf=mine"],
            path=sys.path,
            began=time.monotonic(),
            first_attempt=4,
            lock=lock.keep_over_exec(),
        )
        driver = ["-c", DRIVER, str(folder), str(code)]
        kept = KeeperTask(
            python=[sys.executable], driver=driver, run=KeptRun(restart=RestartConfig(**restart)), task=task
        )
        command = [*prefix, sys.executable, "-m", keeper.__name__, json.dumps(dataclasses.asdict(kept))]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(task.lock,)
        )
        lock.release()

    def begun(self, number):
        """What the driver of that number has seen."""
        file = self.folder / f"begun-{number}"
        return json.loads(wait_until(lambda: file.exists() and file.read_text()))

    def kill(self, number):
        os.kill(self.begun(number)["pid"], signal.SIGKILL)

    def ask_again(self, number, **again):
        self.begun(number)
        self.paths.again.write_text(json.dumps(again))
        (self.folder / f"again-{number}").touch()

    def before(self, number):
        return self.begun(number)["task"]["before"]

    def ends(self):
        return self.process.wait(scaled(60))

    def said(self):
        return self.process.communicate(timeout=scaled(60))

    def events(self):
        return list(read_lines(self.paths.events))


@pytest.fixture
def kept(tmp_path):
    started = []

    def start(**options):
        started.append(Kept(tmp_path, **options))
        return started[-1]

    yield start
    for one in started:
        left = descendants(one.process.pid)
        one.process.kill()
        for process in left:
            send(process, signal.SIGKILL)  # or it has ended since, for its keeper is gone
        one.process.communicate()
        for file in tmp_path.glob("begun-*"):
            if process := identify(json.loads(file.read_text())["left"]):
                send(process, signal.SIGKILL)


def test_a_killed_driver_is_followed_by_one_that_knows_of_it(kept):
    one = kept()
    first = one.begun(0)
    assert first["task"]["before"] is None
    assert first["group"] == first["pid"], "a terminal's Ctrl-C would reach it twice"
    one.kill(0)
    before = one.before(1)
    assert (before["cause"], before["times"]) == ("driver_lost", 1)
    assert before["reason"] == "it was ended by SIGKILL; once in this command"
    assert {**one.begun(1)["task"], "before": None} == first["task"], "all else is as it was"
    os.kill(one.process.pid, signal.SIGTERM)
    assert one.ends() == 0
    assert "the driver was ended by SIGKILL; it is begun again in 0 s\n" in one.said()[1]
    assert [line["event"] for line in one.events()] == ["run.started"], "it has ended by itself"


def test_what_a_killed_driver_leaves_is_found_below_the_keeper(kept):
    """Nobody would end it: its own parent is gone."""
    one = kept()
    left = identify(one.begun(0)["left"])
    one.kill(0)
    one.begun(1)
    assert left in children(one.process.pid)
    send(left, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{left.pid}").exists())  # and it is no zombie


def test_a_driver_that_asks_for_another_attempt_is_followed_by_one_that_knows_why(kept):
    one = kept()
    one.ask_again(0, cause="cluster_lost", reason="the raylet ended", began=5.5, logs={"raylet": "/tmp/raylet.out"})
    before = one.before(1)
    assert (before["cause"], before["reason"], before["began"]) == ("cluster_lost", "the raylet ended", 5.5)
    assert before["logs"] == {"raylet": "/tmp/raylet.out"}
    assert not one.paths.again.exists(), "the next one's end would be taken for it"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_once_and_the_exit_code_back(kept, number):
    one = kept(code=7)
    one.begun(0)
    os.kill(one.process.pid, number)
    assert one.ends() == 7
    assert (one.folder / "heard").read_text() == number.name


def test_under_nohup_a_closed_terminal_is_not_passed_on(kept):
    one = kept(prefix=("nohup",))
    one.begun(0)
    os.kill(one.process.pid, signal.SIGHUP)
    os.kill(one.process.pid, signal.SIGINT)
    assert one.ends() == 0
    assert (one.folder / "heard").read_text() == "SIGINT"


def test_a_keeper_that_is_killed_has_its_driver_save_and_end_and_keeps_the_run_locked_until_then(kept):
    one = kept()
    driver = identify(one.begun(0)["pid"])
    (one.folder / "saves").touch()
    one.process.kill()
    one.process.wait()
    wait_until(lambda: (one.folder / "heard").exists() and (one.folder / "heard").read_text() == "SIGINT")
    assert "is already running" in _refusal(one.paths)
    (one.folder / "saves").unlink()
    wait_until(lambda: identify(driver.pid) != driver)
    RunLock(one.paths).release()


def _refusal(paths):
    with pytest.raises(Exception, match="running") as refused:
        RunLock(paths)
    return str(refused.value)


def test_one_that_is_killed_again_and_again_ends_the_run_with_a_status(kept):
    one = kept(driver=1)
    one.kill(0)
    one.begun(1)
    append_line(one.paths.events, {"event": "incident.began", "attempt": 5, "incident": 1, "cause": "driver_lost"})
    memory = RunMemory(attempt=5)
    memory.incidents.begin(1, Cause.DRIVER_LOST, "driver", time.monotonic())
    memory_file(one.paths).write(memory)
    one.kill(1)
    out, _ = one.said()
    assert one.ends() == 3
    spent = "the driver was ended by SIGKILL; 1 new driver brought no further step (restart.driver)"
    assert f"ERRORED  kept / trial0: {spent}" in out
    assert "conf=mine" in out
    incident, ended = one.events()[-2:]
    assert (incident["event"], incident["is_mended"], incident["reason"]) == ("incident.ended", False, spent)
    assert (ended["event"], ended["attempt"], ended["exit_code"]) == ("run.errored", 5, 3)
    assert spent in one.paths.report.read_text()


def test_one_that_was_killed_while_it_closed_ends_the_run_as_it_had_recorded(kept):
    """Another attempt of a run that had halted was begun."""
    one = kept(driver=0)
    one.begun(0)
    append_line(one.paths.events, {"event": "run.errored", "attempt": 4, "reason": "it halted", "exit_code": 3})
    one.kill(0)
    out, _ = one.said()
    assert one.ends() == 3
    assert "ERRORED  kept / trial0: it halted" in out
    assert [line["event"] for line in one.events()].count("run.errored") == 1


@pytest.mark.parametrize("steps", ["ledger", "now"])
def test_steps_between_the_kills_refill_the_budget(kept, steps):
    one = kept(driver=1)
    for number in range(3):
        one.begun(number)
        if steps == "ledger":
            append_line(one.paths.ledger, {"global_step": number})
        else:
            one.paths.now.write_text(json.dumps({"status": {"next_step": number + 1}}))
        one.kill(number)
    assert one.before(3)["times"] == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_that_a_driver_could_not_obey_any_more_ends_the_run(kept, number, code):
    one = kept()
    driver = identify(one.begun(0)["pid"])
    send(driver, signal.SIGSTOP)
    os.kill(one.process.pid, number)
    wait_until(lambda: not _pending(one.process.pid))
    send(driver, signal.SIGKILL)
    assert one.ends() == code
    ended = one.events()[-1]
    assert (ended["event"], ended["exit_code"]) == ("run.aborted", code)
    assert not (one.folder / "begun-1").exists()


def _pending(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))


def test_of_a_run_that_had_not_begun_nothing_is_recorded(kept):
    one = kept()
    one.begun(0)
    one.paths.events.write_text("")
    append_line(one.paths.events, {"event": "run.started", "attempt": 3})
    os.kill(one.begun(0)["pid"], signal.SIGSTOP)
    os.kill(one.process.pid, signal.SIGINT)
    wait_until(lambda: not _pending(one.process.pid))
    one.kill(0)
    assert one.ends() == 130
    assert "ABORTED: ended by the user" in one.said()[1]
    assert [line["event"] for line in one.events()] == ["run.started"]


def test_the_tools_find_the_driver_below_its_keeper(kept):
    one = kept()
    pid = one.begun(0)["pid"]
    signed = {"pid": one.process.pid, "host": socket.gethostname(), "since": 0.0}
    one.paths.lock.write_text(json.dumps(signed))
    assert find_driver(one.paths).pid == pid
    os.kill(one.process.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: identify(pid) is None)
    with pytest.raises(NotLive, match="begins another one"):
        find_driver(one.paths)
    assert is_live(one.paths), "what is between two drivers has not ended"
    os.kill(one.process.pid, signal.SIGCONT)
    pid = one.begun(1)["pid"]
    assert find_driver(one.paths).pid == pid


def test_the_keeper_is_small(kept):
    one = kept()
    one.begun(0)
    maps = Path(f"/proc/{one.process.pid}/maps").read_text()
    assert not [name for name in ("torch", "_raylet", "pydantic", "numpy") if name in maps]
    assert psutil.Process(one.process.pid).memory_info().rss < 25 * 2**20


# ── how a command becomes one ──


@pytest.mark.parametrize("is_module", [True, False])
def test_a_command_becomes_the_keeper_with_the_lock_and_its_settings_written(tmp_path, monkeypatch, is_module):
    config = RunConfig(experiment_name="kept", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    config.cluster.address = "10.0.0.1:6379"
    config.alerts.webhook = "https://chat.test/secret"
    executed = []
    monkeypatch.setattr(os, "execv", lambda path, command: executed.append(command))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "launcher"] if is_module else ["python", "grpo-launcher"])
    monkeypatch.setattr(sys, "argv", ["launcher", "conf=mine", "alerts.webhook=https://chat.test/secret"])
    keeper.begin(config)
    ((*python, minus_m, module, text),) = executed
    assert (minus_m, module) == ("-m", "launcher.cli.keeper")
    assert python == ([sys.executable] if is_module else [sys.executable, "-P"]), "users' folders come last"
    kept, paths = KeeperTask.read(text), RunPaths.of(config)
    try:
        assert (kept.run.least_wait_s, kept.run.resumes) == (15.0, True)
        assert kept.task.words[0] == "conf=mine"
        assert "secret" not in text + paths.settings.read_text()
        assert kept.task.text().startswith(TASK)
        assert kept.task.first_attempt == 1
        assert os.get_inheritable(kept.task.lock)
        assert read_config(paths.settings) == config
        assert "is already running" in _refusal(paths)
    finally:
        os.close(kept.task.lock)


def test_internal_and_final_exit_codes_differ():
    assert AGAIN not in {0, 1, 2, 3, 75, 130}
