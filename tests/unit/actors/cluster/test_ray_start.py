"""A local Ray that does not start: on a busy machine it is tried again for minutes, and the screen says why."""

import signal
import subprocess

import psutil
import pytest

from actors.cluster import ray_cluster

SLOW_S, FAST_S = 31.0, 1.0


class Starts:
    """Fails so often, after so many seconds each."""

    def __init__(self, failures, seconds):
        self.failures = failures
        self.seconds = seconds
        self.tries = 0
        self.now = 0.0
        self.said = []

    def __call__(self):
        self.tries += 1
        self.now += self.seconds
        if self.tries <= self.failures:
            raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as Ray does

    def patiently(self, **how):
        ray_cluster.start_patiently(self, self.said.append, lambda: self.now, **how)


def test_each_failure_for_the_load_is_said_and_tried_again():
    starts = Starts(failures=3, seconds=SLOW_S)
    starts.patiently()
    assert starts.tries == 4
    assert len(starts.said) == 3
    assert starts.said[0].startswith("Ray did not start within 31 s (the load of this machine is ")
    assert "timed out during startup" in starts.said[0]


def test_for_minutes_and_no_longer():
    starts = Starts(failures=10**9, seconds=SLOW_S)
    with pytest.raises(Exception, match="timed out during startup"):
        starts.patiently()
    assert ray_cluster.START_S <= starts.now < ray_cluster.START_S + SLOW_S
    assert starts.now > 2 * 30


@pytest.mark.parametrize("seconds", [SLOW_S, FAST_S])
def test_a_stop_is_heard_when_the_try_under_way_has_failed(seconds):
    starts = Starts(failures=10**9, seconds=seconds)
    with pytest.raises(KeyboardInterrupt):
        starts.patiently(is_stopped=lambda: starts.tries == 2)
    assert starts.tries == 2
    assert len(starts.said) == 1, "the second try is not followed by a third"


def test_what_fails_at_once_is_not_for_the_load():
    starts = Starts(failures=10**9, seconds=FAST_S)
    with pytest.raises(Exception, match="timed out during startup"):
        starts.patiently()
    assert starts.tries == 2


def test_a_start_that_works_says_nothing():
    starts = Starts(failures=0, seconds=FAST_S)
    starts.patiently()
    assert (starts.tries, starts.said) == (1, [])


def test_what_a_failed_start_left_is_ended_and_is_not_the_end_of_the_next(tmp_path):
    """Ray's own shutdown forgets a start that failed: the dead raylet of the first ended the run of the second."""
    program = tmp_path / "raylet"
    program.symlink_to("/bin/sleep")
    ours = subprocess.Popen(["/bin/sleep", "1000"])
    left = []

    def connect():
        if not left:
            left.append(subprocess.Popen([program, "1000"]))
            raise Exception("The current node timed out during startup.")  # noqa: TRY002 - as Ray does

    try:
        ray_cluster.start_patiently(connect, lambda _: None)
        assert not psutil.pid_exists(left[0].pid)
        assert ray_cluster.VitalProcesses().lost() == ""
        assert ours.poll() is None, "what was there before is nobody's leftover"
    finally:
        for process in (ours, *left):
            process.kill()
            process.wait()


def test_a_child_that_ends_while_the_vital_processes_are_found_breaks_no_start(monkeypatch):
    class Child:
        def __init__(self, called):
            self.called = called
            self.pid = 0

        def name(self):
            if not self.called:
                raise psutil.NoSuchProcess(0)
            return self.called

        def status(self):
            return psutil.STATUS_SLEEPING

    class Own:
        def children(self, recursive):
            return [Child("gcs_server"), Child(""), Child("raylet"), Child("python")]

    monkeypatch.setattr(ray_cluster.psutil, "Process", Own)
    watched = ray_cluster.VitalProcesses()
    assert sorted(watched._processes.values()) == ["gcs_server", "raylet"]
    assert watched.lost() == ""


def test_a_vital_process_that_stays_stopped_is_ended_and_one_that_continues_is_not(tmp_path, monkeypatch):
    program = tmp_path / "raylet"
    program.symlink_to("/bin/sleep")
    vital = subprocess.Popen([program, "1000"])
    clock = [0.0]
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: clock[0])

    def later(seconds, signal_sent, status):
        vital.send_signal(signal_sent)
        while psutil.Process(vital.pid).status() != status:
            pass
        clock[0] += seconds
        return watched.lost()

    try:
        watched = ray_cluster.VitalProcesses("", tmp_path)
        for _ in range(3):  # each time for less than the limit
            assert later(0, signal.SIGSTOP, psutil.STATUS_STOPPED) == ""
            assert later(59, signal.SIGSTOP, psutil.STATUS_STOPPED) == ""
            assert later(1, signal.SIGCONT, psutil.STATUS_SLEEPING) == ""
        assert later(0, signal.SIGSTOP, psutil.STATUS_STOPPED) == ""
        lost = later(61, signal.SIGSTOP, psutil.STATUS_STOPPED)
        assert "raylet ended (it was stopped, did not continue for 60 s, and was killed for it)" in lost
        assert vital.wait() == -signal.SIGKILL
        assert watched.lost() == lost, "asked again, it says the same"
    finally:
        vital.kill()
        vital.wait()


AGENT_FAILED = "because one Ray agent failed, agent_name = runtime_env_agent."


@pytest.mark.parametrize(
    ("command", "log", "says"),
    [
        ("kill -9 $$", "", " (by SIGKILL)"),
        ("exit 1", AGENT_FAILED, " (its log: the agent runtime_env_agent failed)"),
        ("exit 1", "nothing of agents", " (exit code 1)"),
        ("exit 0", "", ""),
    ],
)
def test_how_a_vital_process_ended_is_said_as_far_as_it_can_be_seen(tmp_path, command, log, says):
    program = tmp_path / "raylet"
    program.symlink_to("/bin/sh")
    (tmp_path / "raylet.out").write_text(log)
    vital = subprocess.Popen([program, "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    try:
        watched = ray_cluster.VitalProcesses("", tmp_path)
        assert watched.lost() == ""
        vital.stdin.close()
        while not (lost := watched.lost()):
            pass
        assert lost == f"Ray's own process raylet ended{says}, and with it all that it ran"
    finally:
        vital.kill()
        vital.wait()
