"""Each attempt of a command has the settings that the command wrote down, and ends the run where it can't begin."""

import json
import subprocess
import sys
import time

import pytest

from launcher import driver, driver_process
from launcher.base.messages import Cause
from launcher.cli import interrupts
from launcher.cli.keeper import DriverTask
from launcher.config.compose import compose
from launcher.driver_process import main
from launcher.policy.next_attempt import BeginAgain
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_memory import RunMemory, memory_file
from launcher.run_files.run_paths import RunLock, RunPaths
from launcher.run_files.written_settings import write_settings

PRESET = """# @package _global_
defaults:
  - arithmetic_cpu
seed: {seed}
"""


class Begun:
    """A run of a preset of the user's own, which has begun; `drives` is one more driver of it."""

    def __init__(self, folder, monkeypatch):
        self.presets = folder / "presets"
        (self.presets / "conf").mkdir(parents=True)
        self.preset = self.presets / "conf" / "mine.yaml"
        self.config = compose(["conf=arithmetic_cpu", "seed=5", f"cluster.fileroot={folder / 'root'}"])
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        write_settings(self.config, self.paths.settings)
        self.journal = Journal(self.paths.events, 1, time.time)
        self.journal.record("run.started", reason="fresh")
        self.journal.record("incident.began", subject="server-0", reason="lost", incident=1, cause="server_crash")
        memory = RunMemory(attempt=1)
        memory.incidents.begin(1, Cause.SERVER_CRASH, "server-0", time.monotonic())
        memory_file(self.paths).write(memory)
        self.lock = RunLock(self.paths)
        self.patch = monkeypatch
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(driver_process, "Interrupts", lambda **_: interrupts.NoInterrupts())  # pytest's own stay

    def drives(self, cause=Cause.DRIVER_LOST):
        before = None
        if cause is not None:
            before = BeginAgain(cause=cause, reason="lost", doing="another", began=1.0, not_before=0.0, times=1)
        task = DriverTask(
            logs=str(self.paths.logs),
            words=[f"--config-dir={self.presets}", "conf=mine"],
            path=sys.path,
            began=2.0,
            first_attempt=1,
            lock=self.lock.keep_over_exec(),
            before=before,
        )
        self.patch.setattr(sys, "argv", ["driver_process", task.text()])
        return main()

    def events(self, name):
        return [event for event in read_lines(self.paths.events) if event["event"] == name]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    one = Begun(tmp_path, monkeypatch)
    yield one
    one.lock.release()


@pytest.mark.parametrize("cause", [None, Cause.CLUSTER_LOST, Cause.RUN_HALTED, Cause.DRIVER_LOST])
@pytest.mark.parametrize("edited", [PRESET.format(seed=6), PRESET.format(seed="none of it: ["), None])
def test_a_preset_that_is_edited_or_removed_meanwhile_changes_nothing(begun, monkeypatch, edited, cause):
    if edited is not None:
        begun.preset.write_text(edited)
    ran = []
    monkeypatch.setattr(driver, "run", lambda config, **given: ran.append((config, given)) or 0)
    assert begun.drives(cause) == 0
    ((config, given),) = ran
    assert config == begun.config
    assert (None if given["task"].before is None else given["task"].before.cause) == cause
    assert sys.argv[1:] == [f"--config-dir={begun.presets}", "conf=mine"], "for the command that resumes it"


def test_one_that_is_refused_before_it_begins_ends_the_run_with_a_status(begun, capsys):
    begun.paths.settings.write_text("seed: [")
    assert begun.drives() == 3
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert "ERRORED, as no further attempt can begin" in said
    assert ".settings.yaml" in said
    (ended,) = begun.events("run.errored")
    assert (ended["exit_code"], ended["attempt"]) == (3, 1)
    (incident,) = begun.events("incident.ended")
    assert (incident["incident"], incident["is_mended"], incident["cause"]) == (1, False, "server_crash")
    assert ".settings.yaml" in begun.paths.report.read_text()


def test_the_first_is_refused_in_a_word_and_records_nothing(begun, capsys):
    begun.paths.settings.write_text("seed: [")
    assert begun.drives(None) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert begun.events("run.errored") == []


def test_ctrl_c_before_it_begins_ends_the_run_with_a_status(begun, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.run_files.written_settings.read_config", interrupted)
    assert begun.drives() == 130
    assert capsys.readouterr().err == "ended by Ctrl-C\n"
    (ended,) = begun.events("run.aborted")
    assert (ended["exit_code"], ended["reason"]) == (130, "ended by the user, before another attempt was begun")
    assert [event["is_mended"] for event in begun.events("incident.ended")] == [False]


@pytest.mark.parametrize(("event", "code"), [("run.errored", 3), ("run.finished", 0), ("run.aborted", 75)])
def test_a_driver_that_was_killed_while_it_closed_is_closed_for(begun, monkeypatch, capsys, event, code):
    """Another attempt of a run that had halted was begun."""
    begun.journal.record(event, reason="so it ended", exit_code=code, global_step=4)
    monkeypatch.setattr(driver, "run", None)
    assert begun.drives() == code
    assert "so it ended" in capsys.readouterr().out
    assert "so it ended" in begun.paths.summary.read_text()
    assert len(begun.events(event)) == 1


def test_an_end_that_an_earlier_command_recorded_is_none_of_this_one_s(begun, monkeypatch):
    Journal(begun.paths.events, 0, time.time).record("run.errored", reason="so it ended", exit_code=3)
    monkeypatch.setattr(driver, "run", lambda config, **given: 7)
    assert begun.drives() == 7


def test_a_task_is_read_as_it_was_written(begun):
    before = BeginAgain(
        cause=Cause.RUN_HALTED, reason="a", doing="b", began=1.5, not_before=2.5, times=3, logs={"raylet": "/x"}
    )
    task = DriverTask(logs="/l", words=["a b"], path=["/p"], began=0.5, first_attempt=7, lock=3, before=before)
    assert DriverTask.read(task.text()) == task
    assert json.loads(task.text())["before"]["cause"] == "run_halted"


HELD_BACK = """
import os, signal, sys
from launcher.driver_process import main
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.kill(os.getpid(), signal.SIGINT)
sys.exit(main())
"""


def test_ctrl_c_that_came_before_it_listened_is_a_word_and_no_traceback():
    done = subprocess.run([sys.executable, "-c", HELD_BACK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "ended by Ctrl-C\n")
