"""When a run begins to save and end because its machine is taken away: earlier the longer that takes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from launcher.cli import preemption_notice
from launcher.cli.deadlines import Deadline, Deadlines, TimesTaken, due, needed_s
from launcher.cli.interrupts import Interrupts
from launcher.cli.preemption_notice import NoticeWatch
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.config.settings import DURATION, seconds_of
from launcher.config.supervision_checks import find_contradictions
from launcher.run_files.journal import Journal, read_lines
from tests.support.machine import wait_until

EARLY = """
import os, signal, threading
from launcher.cli.interrupts import Interrupts
Interrupts.hold_back_notice()
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.kill(os.getpid(), signal.SIGUSR1)
with Interrupts() as interrupts:
    print(interrupts.notified_at is not None)
"""
KNOWN = TimesTaken(save_s=20.0, update_s=5.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("10:00", 600),
        ("23:50:00", 85_800),
        ("100:00:00", 360_000),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("2-00:00:01", 172_801),
    ],
)
def test_a_duration_as_slurm_writes_it_or_in_seconds(text, seconds):
    assert seconds_of(text) == seconds
    assert re.match(DURATION["pattern"], text)


@pytest.mark.parametrize("text", ["", "0", "-5", "1h", "1:60", "10:61:00", "1:2:3:4", "1-", "1-2.5", "nan", "inf"])
def test_anything_else_is_refused(text):
    assert not re.match(DURATION["pattern"], text)


@pytest.mark.parametrize(
    ("took", "needed"),
    [
        (KNOWN, 30 + 2 * 20 + 5),
        (TimesTaken(), 30 + 30),
        (TimesTaken(save_s=20.0, copy_s=None, update_s=5.0), 30 + 2 * 20 + 30 + 5),
        (TimesTaken(save_s=20.0, copy_s=100.0, update_s=5.0), 30 + 2 * 20 + 2 * 100 + 5),
    ],
)
def test_what_is_needed_follows_from_the_last_save_and_the_margin_stands_for_what_is_unknown(took, needed):
    assert needed_s(took, 30.0) == needed


def test_it_is_due_at_the_last_moment_that_leaves_what_is_needed_before_the_first_deadline():
    deadlines = [Deadline(at=1000.0, what="run.walltime=1000"), Deadline(at=900.0, what="the time that SIGUSR1 leaves")]
    assert due(deadlines, KNOWN, 30.0, now=824.9) == ""
    said = "the time that SIGUSR1 leaves ends in 75 s, and to save and end takes up to 75 s"
    assert due(deadlines, KNOWN, 30.0, now=825.0) == said
    assert "ends in 0 s" in due(deadlines, KNOWN, 30.0, now=2000.0)
    assert due([], KNOWN, 30.0, now=1e9) == ""


@pytest.fixture
def watched(tmp_path):
    def make(*, interrupts=None, began=None, url=None, **settings):
        config = RunConfig(experiment_name="ends", train_dataset=DatasetConfig(path="none"))
        config.recover.url = url
        for key, value in settings.items():
            setattr(config.run, key, value)
        journal = Journal(tmp_path / "events.jsonl", 1, time.time)
        return Deadlines(config, journal, interrupts or Interrupts(), began=began)

    make.events = tmp_path / "events.jsonl"
    return make


def test_walltime_counts_from_the_start_of_the_process(watched):
    ends = watched(walltime="1:00:00", margin_s=100.0)
    began = time.monotonic() - (time.time() - psutil.Process().create_time())
    assert not ends.is_due(now=began + 3600 - 200 - 1)
    assert ends.is_due(now=began + 3600 - 200 + 1)
    assert ends.reason.startswith("run.walltime=1:00:00 ends in ")
    assert ends.is_due(now=began), "it stays due"
    assert [event["event"] for event in read_lines(watched.events)] == ["run.deadline"]


def test_a_driver_that_was_begun_again_has_what_is_left_of_the_command_s_time(watched):
    ends = watched(walltime="3600", margin_s=100.0, began=4000.0)
    assert not ends.is_due(now=7399.0)
    assert ends.is_due(now=7401.0)


def test_the_pace_is_that_of_the_last_save_copy_and_update(watched):
    ends = watched(walltime="1000", margin_s=10.0, began=0.0, url="file:///there")
    ends.follow({"event": "checkpoint.committed", "seconds": 300.0})
    ends.follow({"event": "checkpoint.committed", "seconds": 50.0})
    ends.follow({"event": "checkpoint.uploaded", "seconds": 20.0})
    ends.follow({"event": "eval.done", "seconds": 999.0})
    timing = {"timeperf/train_s": 3.0, "timeperf/publish_s": 1.0, "timeperf/state_s": 1.0, "timeperf/rollout_s": 99.0}
    ends.take_steps([{}, timing])
    ends.take_steps([])
    assert not ends.is_due(now=1000 - 10 - 100 - 40 - 5 - 1)
    assert ends.is_due(now=1000 - 10 - 100 - 40 - 5 + 1)


def test_sigusr1_says_that_so_many_seconds_are_left(watched):
    with Interrupts() as interrupts:
        ends = watched(interrupts=interrupts, notice_s=500.0, margin_s=50.0)
        assert not ends.is_due()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        at = interrupts.notified_at
        assert not interrupts.asked
        assert not ends.is_due(now=at + 399.0)
        assert ends.is_due(now=at + 401.0)


def test_a_notice_that_comes_before_anybody_listens_is_not_lost():
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_notice_begins_its_own_time(watched, tmp_path):
    file = tmp_path / "notice"
    with watched(preemption_notice=str(file), notice_interval_s=0.01, notice_s=40.0, margin_s=20.0) as ends:
        assert not ends.is_due()
        file.touch()
        wait_until(ends.is_due)
        assert ends.reason.startswith(f"the time that the notice in {file} leaves ends in ")


def test_who_asks_for_the_deadline_finds_a_look_for_the_notice_that_hangs(watched, tmp_path, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(preemption_notice, "STUCK_S", 0.05)
    monkeypatch.setattr(NoticeWatch, "_look_at_file", lambda watch, file: over.wait(60))
    with watched(preemption_notice=str(tmp_path / "notice")) as ends:
        wait_until(lambda: ends.is_due() or watched.events.exists())
        assert [event["event"] for event in read_lines(watched.events)] == ["notice.unreadable"]
        over.set()


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        ({"walltime": "60"}, "run.walltime", "more than 60 s, twice run.margin_s: the run would end at once"),
        (
            {"preemption_notice": "/run/notice", "notice_s": 30.0},
            "run.notice_s",
            "more than run.margin_s=30, or there is no time to save in; where a cloud leaves no more than that, lower "
            "run.margin_s",
        ),
    ],
)
def test_deadlines_that_leave_no_time_are_refused(settings, key, says):
    config = RunConfig(experiment_name="ends", train_dataset=DatasetConfig(path="none"))
    for name, value in settings.items():
        setattr(config.run, name, value)
    assert (key, says) in list(find_contradictions(config))


def test_a_detached_run_has_no_walltime():
    config = RunConfig(experiment_name="ends", train_dataset=DatasetConfig(path="none"))
    config.run.walltime = "1:00:00"
    config.cluster.detached = True
    assert "run.walltime" in dict(find_contradictions(config))
