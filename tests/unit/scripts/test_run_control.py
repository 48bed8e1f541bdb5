"""What a person sees of a run and asks of it, through its files alone; the driver is a thread that writes them."""

import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from launcher.base.errors import StorageError
from launcher.base.messages import ServerInfo, ServerState, TrainerStatus
from launcher.base.own_python import python
from launcher.cli import attach as attach_module
from launcher.cli.attach import attach
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts, read_now
from launcher.run_files.control_requests import ControlRequest, RequestEntry, ask, wanted
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths, next_attempt
from launcher.run_log.run_log import last_end
from scripts import run_control, run_processes
from tests.support.machine import wait_until

STATUS = TrainerStatus(
    phase="rollout",
    next_step=7,
    total_steps=20,
    steps_per_epoch=10,
    policy_version=7,
    pid=1,
    seconds_in_phase=0.5,
)
SERVER = ServerInfo(name="server-0", index=0, generation=0, state=ServerState.READY, weight_version=7)


@pytest.fixture(autouse=True)
def beats_fast(monkeypatch):
    monkeypatch.setattr(run_processes, "BEAT_S", 1.0)


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="me", experiment_name="e", trial_name="t")
    paths.prepare()
    ServerKeys.make(paths.keys)
    return paths


@pytest.fixture
def journal(paths):
    journal = Journal(paths.events, 1, time.time)
    journal.record("run.started")
    return journal


def fleet(asked):
    """Two servers, or as many as are wanted."""
    size = 2 if asked is None or asked.servers is None else asked.servers
    return tuple(dataclasses.replace(SERVER, name=f"server-{index}") for index in range(size))


class Driver:
    """Writes what a driver writes, and does what is asked as a Coordinator would; its trainer ends its step first."""

    def __init__(self, paths, journal, *, looks_in_step=5):
        self.paths = paths
        self.journal = journal
        self.looks_in_step = looks_in_step
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._drive)

    def _drive(self):
        file = CurrentStatusFile(
            self.paths, DriverFacts.of_this_process(self.paths, 1, address="10.0.0.1:6379", is_detached=True)
        )
        state, paused_for = "RUNNING", 0
        self.journal.record("run.running", state=state)
        while not self._over.wait(0.02):
            asked = wanted(self.paths)
            paused_for = paused_for + 1 if state == "PAUSED" else 0
            status = dataclasses.replace(STATUS, phase="idle") if paused_for > self.looks_in_step else STATUS
            file.heard(status, fleet(asked), ())
            file._written_at = float("-inf")
            file.write_if_due()
            wish = ControlRequest.RUN if asked is None else asked.wish
            if wish is ControlRequest.STOP:
                self.journal.record("run.aborted", reason=asked.description, exit_code=130)
                return
            now = "PAUSED" if wish is ControlRequest.PAUSE else "RUNNING"
            if now != state:
                state = now
                self.journal.record(f"run.{state.lower()}", state=state)

    def die(self):
        self._over.set()
        self._thread.join()

    def __enter__(self):
        self._thread.start()
        wait_until(lambda: run_control.lives(self.paths))  # else what is asked at once finds nobody
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def control(paths, *words):
    return run_control.main(
        [*words, "--experiment-name", "e", "--trial-name", "t", "--fileroot", str(paths.fileroot), "--user", "me"]
    )


@pytest.mark.slow
def test_a_run_is_paused_goes_on_and_is_stopped(paths, journal, capsys):
    with Driver(paths, journal):
        assert control(paths, "pause", "--reason", "lunch") == 0
        assert control(paths, "status") == 0
        said = capsys.readouterr().out
        assert "e/t is PAUSED" in said
        assert "lunch" in said
        assert "server" in said
        assert "step 7/20" in said
        assert control(paths, "resume") == 0
        assert "e/t is RUNNING" in capsys.readouterr().out
        assert control(paths, "stop") == 0
    assert last_end(paths)["exit_code"] == 130


def test_a_pause_is_done_when_the_trainer_has_ended_its_step(paths, journal, capsys):
    with Driver(paths, journal, looks_in_step=sys.maxsize) as driver:
        assert control(paths, "pause", "--timeout", "0") == 0
        wait_until(lambda: run_control.state_of(paths)[0] == "PAUSED")
        assert control(paths, "pause", "--timeout", "0.5") == 4
        assert "; its trainer is in a step still, at rollout" in capsys.readouterr().err
        driver.looks_in_step = 0
        assert control(paths, "pause") == 0


@pytest.mark.slow
def test_servers_join_and_leave_and_a_pause_after_that_changes_nothing_of_it(paths, journal, capsys):
    with Driver(paths, journal):
        assert control(paths, "scale", "--servers", "3") == 0
        assert "with server-0, server-1, server-2" in capsys.readouterr().out
        assert control(paths, "scale", "--servers", "2") == 0
        assert "with server-0, server-1\n" in capsys.readouterr().out
        assert wanted(paths).at == 0.0, "no new wish that the run goes on, which would end a wait"
        assert control(paths, "pause") == 0
    asked = wanted(paths)
    assert asked.at > 0.0
    assert (asked.wish, asked.servers) == (ControlRequest.PAUSE, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "scale needs --servers"),
        (["--servers", "0"], "--servers 0: a run needs a server"),
    ],
)
def test_a_size_that_can_not_be_is_refused_and_nothing_is_asked(paths, journal, capsys, words, said):
    with Driver(paths, journal):
        assert control(paths, "scale", *words) == 2
    assert said in capsys.readouterr().err
    assert wanted(paths) is None


def test_more_servers_than_there_are_ports_are_refused_and_nothing_is_asked(paths, journal, capsys):
    """The further server's port was beyond 65535: it failed at each of its starts."""
    paths.config.write_text("sglang: {port: 65534, n_servers: 2}\n")
    with Driver(paths, journal):
        assert control(paths, "scale", "--servers", "3") == 2
    assert "--servers 3: sglang.port=65534: at most 65533, as 3 servers" in capsys.readouterr().err
    assert wanted(paths) is None


@pytest.mark.slow
def test_status_of_a_run_that_is_over_and_of_one_that_never_was(paths, journal, capsys):
    journal.record("run.finished", reason="all steps are done", exit_code=0)
    assert control(paths, "status") == 1
    assert "is not running: FINISHED, all steps are done" in capsys.readouterr().out
    for what in ("pause", "attach"):
        assert control(paths, what) == 2
        assert "is not running" in capsys.readouterr().err
    assert wanted(paths) is None, "nothing was asked"
    assert control(paths, "pause") == 2
    assert "nothing left to control" in capsys.readouterr().err
    where = ["--fileroot", str(paths.fileroot), "--user", "me"]
    assert run_control.main(["status", "--experiment-name", "other", *where]) == 2
    said = capsys.readouterr().err
    assert "--experiment-name other: there is no such folder in" in said
    assert "which holds e" in said
    assert control(paths, "status", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["servers"]) == ("FINISHED", []), "none of them serves any more"


@pytest.mark.slow
def test_a_run_that_was_cut_off_says_what_goes_on_with_it(paths, journal, capsys):
    assert control(paths, "stop") == 2
    said = capsys.readouterr().err
    assert f"{python()} -m scripts.resume_training --experiment-name e --trial-name t --fileroot" in said
    assert "--user me" in said
    assert control(paths, "status") == 1
    said = capsys.readouterr().out
    assert "is not running: its driver is gone and did not write how it ended" in said
    assert "resume_training" in said


def test_a_run_is_named_by_its_folder_by_a_name_with_a_slash_or_not_at_all(paths, journal, capsys, monkeypatch):
    """As check_health and report take it; a shell completes a folder's name with a slash."""
    monkeypatch.chdir(paths.logs.parent)
    where = ["--fileroot", str(paths.fileroot), "--user", "me"]
    with Driver(paths, journal):
        assert run_control.main(["status", f"{paths.logs}/"]) == 0
        assert run_control.main(["status", "t"]) == 0
        assert run_control.main(["status", *where]) == 0
        assert run_control.main(["status", "--experiment-name", "e/", "--trial-name", "t/", *where]) == 0
        assert capsys.readouterr().out.count("e/t is RUNNING") == 4
        assert run_control.main(["pause", str(paths.checkpoints)]) == 2
        assert "is not …/logs/<user>/<experiment>/<trial>" in capsys.readouterr().err
        assert wanted(paths) is None
        (paths.logs.parent / "t2").mkdir()
        assert run_control.main(["stop", "--experiment-name", "e", *where]) == 2
        assert "--trial-name is not given" in capsys.readouterr().err
        assert wanted(paths) is None, "of two trials none is stopped by accident"


@pytest.mark.parametrize("seconds", ["nan", "inf", "-3", "soon"])
def test_a_timeout_that_would_never_end_is_refused(paths, journal, seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        control(paths, "pause", f"--timeout={seconds}")
    assert ended.value.code == 2
    assert "--timeout" in capsys.readouterr().err
    assert wanted(paths) is None


def test_a_wait_ends_with_the_run(paths, journal, capsys, monkeypatch):
    """Stopped by another while this one waits for its pause."""
    with Driver(paths, journal):
        monkeypatch.setattr(
            run_control, "ask", lambda paths, request: ask(paths, RequestEntry(wish=ControlRequest.STOP, by="else"))
        )
        assert control(paths, "pause", "--timeout", "60") == 4
    assert "not done: e/t has ended: ABORTED" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wait_for_a_driver_that_died_says_so(paths, journal, capsys, monkeypatch):
    with Driver(paths, journal) as driver:
        monkeypatch.setattr(run_control, "ask", lambda paths, request: driver.die())
        assert control(paths, "pause", "--timeout", "0.5") == 4
    said = capsys.readouterr().err
    assert "the driver of e/t stopped writing; it was RUNNING" in said
    assert "scripts.resume_training" in said


def test_status_as_json(paths, journal, capsys):
    with Driver(paths, journal):
        assert control(paths, "status", "--json") == 0
        said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["steps_done"], said["is_detached"]) == ("RUNNING", 7, True)


def test_status_of_another_users_run_says_nothing_of_what_was_asked(paths, journal, capsys, monkeypatch):
    def refused(_):
        raise StorageError("request.json can't be read", "look at it") from PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_control, "wanted", refused)
    capsys.readouterr()
    control(paths, "status", "--json")
    assert json.loads(capsys.readouterr().out)["asked"] is None


def sign_elsewhere(paths):
    """The run's lock gets the name of a process that is not seen here: it has ended, or is a container's."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    paths.lock.write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname()}))


def test_a_run_whose_process_is_not_there_is_not_waited_for(paths, journal, monkeypatch, capsys):
    """The answer took 8 s, in which a live run's Coordinator may be replaced."""
    monkeypatch.setattr(run_processes, "BEAT_S", 3600.0)
    with Driver(paths, journal):
        pass
    sign_elsewhere(paths)
    assert control(paths, "status") == 1
    assert "its driver is gone" in capsys.readouterr().out


def test_a_run_whose_process_s_number_is_another_s_by_now_is_not_waited_for(paths, journal, monkeypatch, capsys):
    """As after a restart of the machine, or of the container: the answer took 8 s."""
    waited = []
    monkeypatch.setattr(run_processes, "next_beat", lambda paths, within_s: waited.append(within_s))
    journal.record("run.finished", reason="all steps are done", exit_code=0)
    paths.lock.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    assert control(paths, "stop") == 2
    assert "is not running: FINISHED, all steps are done" in capsys.readouterr().err
    assert waited == []


def test_a_run_of_another_machine_that_wrote_its_end_is_not_waited_for(paths, journal, monkeypatch, capsys):
    """The answer took 8 s, though nothing was to come."""
    waited = []
    monkeypatch.setattr(run_processes, "next_beat", lambda paths, within_s: waited.append(within_s))
    paths.attempt_counter.write_text("1\n")
    paths.lock.write_text(json.dumps({"pid": 1, "host": "another"}))
    assert control(paths, "stop") == 2
    assert "its driver is gone" in capsys.readouterr().err
    assert waited == [run_processes.BEAT_S], "whether it lives is not seen from here"
    journal.record("run.finished", reason="all steps are done", exit_code=0)
    assert control(paths, "stop") == 2
    assert "is not running: FINISHED, all steps are done" in capsys.readouterr().err
    assert waited == [run_processes.BEAT_S]
    next_attempt(paths)
    run_processes.seen_to_write(paths)
    assert waited == [run_processes.BEAT_S] * 2, "another attempt has begun, and written nothing yet"


def test_a_run_in_a_container_is_waited_for_as_any_other(paths, monkeypatch):
    """It was said to be gone after 1.5 s without a line, though somebody held its lock."""
    waited = []
    monkeypatch.setattr(run_processes, "next_beat", lambda paths, within_s: waited.append(within_s))
    sign_elsewhere(paths)
    with paths.lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run_processes.seen_to_write(paths)
    assert waited == [run_processes.BEAT_S]


def test_what_is_not_done_in_time_is_said_and_still_holds(paths, journal, capsys):
    with Driver(paths, journal):
        pass
    file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 1, address="auto", is_detached=False))
    stop = threading.Event()

    def beat():
        while not stop.wait(0.02):
            file._written_at = float("-inf")
            file.write_if_due()

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        assert control(paths, "pause", "--timeout", "0.3") == 4
    finally:
        stop.set()
        beating.join()
    assert wanted(paths).wish is ControlRequest.PAUSE


@pytest.mark.slow
def test_attach_shows_the_run_and_ends_with_its_code(paths, journal, capsys):
    with Driver(paths, journal):
        figures = {"rollout/reward": 0.5, "timeperf/step_s": 1.0}
        head = {"global_step": 6, "epoch": 0, "epoch_step": 6, "attempt": 1, "policy_version": 7, "time": 1.0}
        append_line(paths.metrics, head | figures)
        threading.Timer(
            1.0, lambda: ask(paths, RequestEntry(wish=ControlRequest.STOP, by="me@here", reason="enough"))
        ).start()
        paths.summary.write_text("the summary of the run")
        assert attach(paths) == 130
    said = capsys.readouterr().out
    assert "step 7/20" in said
    assert "reward 0.500" in said
    assert "the summary of the run" in said


def test_attach_ends_where_nothing_is_heard_any_more(paths, journal, monkeypatch, capsys):
    monkeypatch.setattr(attach_module, "SILENT_S", 0.3)
    assert attach(paths) == 3
    assert "the run has written nothing" in capsys.readouterr().out


def test_attach_that_stood_still_itself_does_not_say_that_the_run_is_gone(paths, journal, monkeypatch):
    """As on a machine that was suspended: the driver had no more time than who looks."""

    class Suspended:
        now, naps, time = 0.0, 0, time.time

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now = self.now + 600.0
            self.naps = self.naps + 1
            if self.naps == 3:
                journal.record("run.finished", reason="all steps are done")

    monkeypatch.setattr(attach_module, "time", Suspended())
    assert attach(paths) == 0


def test_attach_does_not_end_with_what_an_earlier_attempt_writes_late(paths, monkeypatch, capsys):
    """The driver of a machine that had lost the network: `attach` said that the run had ended, and left."""
    file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 2, address="auto", is_detached=True))
    file.write_if_due()
    file._writer.join()
    ends = iter(((1, "aborted"), (2, "finished")))

    class Clock:
        monotonic, time = time.monotonic, time.time

        def sleep(self, seconds):
            attempt, status = next(ends)
            Journal(paths.events, attempt).record(f"run.{status}", reason=status)

    monkeypatch.setattr(attach_module, "SUMMARY_S", 0.0)
    monkeypatch.setattr(attach_module, "time", Clock())
    assert attach(paths) == 0
    assert "FINISHED: finished" in capsys.readouterr().out


def test_what_a_run_is_at_survives_its_file(paths):
    file = CurrentStatusFile(paths, DriverFacts.of_this_process(paths, 3, address="auto", is_detached=False))
    file.heard(STATUS, (SERVER,), ())
    file.write_if_due()
    file._writer.join()
    found = read_now(paths)
    assert (found.attempt, found.status, found.servers) == (3, STATUS, (SERVER,))
    paths.now.write_text("{")
    assert read_now(paths) is None
    assert dataclasses.is_dataclass(found)
