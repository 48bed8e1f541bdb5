"""A trainer that has ended is told from the workers that it forked, which have its command line; real processes."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from actors.foreign import foreign_process
from actors.foreign.foreign_process import TreeWatch, kill, run_to_end
from actors.foreign.foreign_progress import ProgressWatch
from actors.processes.process_tree import command_line, descendants, stat_fields, wait_ended
from launcher.adapters.trainer_adapter import TrainerCommand
from launcher.base.messages import Health
from launcher.config.supervision import HealthConfig
from launcher.run_files.run_paths import RunPaths
from tests.support.machine import scaled

HOST = """
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
subprocess.Popen(["sh", "-c", f"{sys.executable} -u train.py; sleep 600"])
time.sleep(600)
"""
TRAIN = "import os, time\nos.fork()\ntime.sleep(600)\n"


WORKERS = (["worker"], ["server"])


def is_trainer(words):
    return words[1:3] == ["-u", "train.py"]


@pytest.fixture
def host(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    process = subprocess.Popen([sys.executable, "-c", HOST], cwd=tmp_path)
    yield process
    for one in descendants(process.pid):
        os.kill(one.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def alike(host):
    return [one for one in descendants(host.pid) if is_trainer(command_line(one))]


def wait_until(holds):
    give_up_at = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    return found


def test_a_trainer_is_lost_although_a_worker_with_its_command_line_lives_on(host, monkeypatch):
    monkeypatch.setattr(foreign_process, "TREE_EVERY_S", 0.0)
    monkeypatch.setattr(foreign_process, "GONE_S", 0.0)
    watch = TreeWatch(SimpleNamespace(host_pid=host.pid, pid=host.pid), is_trainer)
    watch.look_at_tree()
    assert not watch.lost, "one that has not begun is not lost"
    pair = wait_until(lambda: found if len(found := alike(host)) == 2 else None)
    watch.look_at_tree()
    monkeypatch.setattr(foreign_process, "GONE_S", 60.0)
    watch.look_at_tree()
    assert not watch.lost
    (rank,) = [one for one in pair if int(stat_fields(one.pid)[1]) not in {other.pid for other in pair}]
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(lambda: len(alike(host)) == 1)
    monkeypatch.setattr(foreign_process, "GONE_S", 0.0)
    watch.look_at_tree()
    assert watch.lost


def test_a_trainer_that_ends_is_missed_before_its_tree_is_due(host, monkeypatch):
    watch = TreeWatch(SimpleNamespace(host_pid=host.pid, pid=host.pid), is_trainer)
    pair = wait_until(lambda: found if len(found := alike(host)) == 2 else None)
    watch.look_at_tree()
    monkeypatch.setattr(foreign_process, "TREE_EVERY_S", 600.0)
    monkeypatch.setattr(foreign_process, "GONE_S", 0.0)
    (rank,) = [one for one in pair if int(stat_fields(one.pid)[1]) not in {other.pid for other in pair}]
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(lambda: len(alike(host)) == 1)
    watch.look_at_tree()
    assert watch.lost


def test_a_stopped_rank_stands_still_while_others_of_its_tree_work(host, monkeypatch):
    """As torchrun does, whose looks at its ranks made the whole tree's CPU time grow: the stop was not seen as one."""
    monkeypatch.setattr(foreign_process, "TREE_EVERY_S", 0.0)
    watch = TreeWatch(SimpleNamespace(host_pid=host.pid, pid=host.pid), is_trainer)
    wait_until(lambda: len(alike(host)) == 2)
    watch.look_at_tree()
    (rank,) = watch.ranks
    used, state_of = itertools.count(), foreign_process.process_state
    monkeypatch.setattr(
        foreign_process, "process_state", lambda pid: state_of(pid) if pid == rank.pid else ("R", float(next(used)))
    )
    assert watch.look_at_tree().stopped_s is None
    os.kill(rank.pid, signal.SIGSTOP)
    wait_until(lambda: state_of(rank.pid)[0] == "T")
    before, after = watch.look_at_tree(), watch.look_at_tree()
    assert (after.state, after.stopped_s) == ("T", before.stopped_s)
    assert after.cpu_s > before.cpu_s
    settings, now = HealthConfig(), [0.0]
    progress = ProgressWatch(settings, watch, list, lambda: now[0])
    while now[0] <= settings.trainer_silence_s + 2:
        verdict = progress.judge_progress(1, 1.0)
        now[0] += settings.look_interval_s
    assert verdict.health is Health.DEAD


def test_last_words_have_their_time_however_old_the_last_look_is(host, monkeypatch):
    """With the last look older than GONE_S, a rank's end was judged at once, and the pipe with its words was killed."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(foreign_process, "time", SimpleNamespace(monotonic=lambda: clock.now))
    watch = TreeWatch(SimpleNamespace(host_pid=host.pid, pid=host.pid), is_trainer)
    wait_until(lambda: len(alike(host)) == 2)
    watch.look_at_tree()
    (rank,) = watch.ranks
    os.kill(rank.pid, signal.SIGTERM)
    wait_until(lambda: not command_line(rank))
    clock.now = 100.0
    watch.look_at_tree()
    assert not watch.lost
    clock.now += foreign_process.GONE_S
    watch.look_at_tree()
    assert watch.lost


def test_a_lost_command_is_killed_with_all_below_it_without_its_host(host):
    wait_until(lambda: len(alike(host)) == 2)
    (shell,) = [one for one in descendants(host.pid) if command_line(one)[0] == "sh"]
    kill(SimpleNamespace(host_pid=host.pid, pid=shell.pid))
    wait_until(lambda: not descendants(host.pid))


SEVERAL = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "worker"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "server"])
time.sleep(600)
"""


@pytest.mark.parametrize("names", [("worker",), ("server",), ("worker", "server")], ids=" and ".join)
def test_of_several_processes_that_it_needs_the_first_that_ends_is_missed_and_named(tmp_path, monkeypatch, names):
    """One of them was missed only once all had ended: a controller that lost a worker seemed to work. And of two that
    one look missed, a worker with the server that it had started, the one was named whose end was no cause."""
    monkeypatch.setattr(foreign_process, "TREE_EVERY_S", 0.0)
    monkeypatch.setattr(foreign_process, "GONE_S", 0.0)
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SEVERAL!r}])"
    with subprocess.Popen([sys.executable, "-c", starts], cwd=tmp_path) as host:
        try:
            watch = TreeWatch(SimpleNamespace(host_pid=host.pid, pid=host.pid), lambda words: words[3:] in WORKERS)
            wait_until(lambda: watch.look_at_tree() and len(watch.ranks) == len(WORKERS))
            assert not watch.lost
            wanted = [one for one in watch.ranks if command_line(one)[3] in names]
            for one in wanted:
                os.kill(one.pid, signal.SIGKILL)
            wait_ended(wanted, scaled(30))
            wait_until(lambda: watch.look_at_tree() and watch.lost)
            assert [f"its process {one.pid} has ended" in watch.lost for one in wanted] == [True] * len(names)
            assert watch.lost.count(" has ended") == len(names)
            assert watch.lost.endswith(f" {names[-1]})")
        finally:
            for one in descendants(host.pid):
                os.kill(one.pid, signal.SIGKILL)


TORCHRUN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-u", "train.py"])
time.sleep(600)  # until it looks for its child, which stays a zombie
"""
ENDS = """
import os, pathlib, signal, time
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""
HOW = {"killed": "os.kill(os.getpid(), signal.SIGKILL)", "failed": "raise SystemExit(1)", "done": ""}


@pytest.mark.parametrize("how", HOW)
def test_a_trainer_that_is_killed_is_lost_at_once_and_one_that_may_have_last_words_later(tmp_path, monkeypatch, how):
    (tmp_path / "train.py").write_text(ENDS + HOW[how])
    monkeypatch.setattr(foreign_process, "TREE_EVERY_S", 0.0)
    monkeypatch.setattr(foreign_process, "GONE_S", 600.0)

    async def ends():
        (rank,) = watch.ranks
        ending = asyncio.create_task(watch.ended(rank))
        await asyncio.sleep(0)
        assert not ending.done()
        (tmp_path / "go").touch()
        await asyncio.wait_for(ending, 60)

    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TORCHRUN!r}])"
    with subprocess.Popen([sys.executable, "-c", starts], cwd=tmp_path) as host:
        try:
            watch = TreeWatch(SimpleNamespace(host_pid=host.pid, pid=host.pid), is_trainer)
            wait_until(lambda: alike(host))
            watch.look_at_tree()
            asyncio.run(ends())
            watch.look_at_tree()
            assert bool(watch.lost) is (how == "killed")
            monkeypatch.setattr(foreign_process, "GONE_S", 0.0)
            watch.look_at_tree()
            assert watch.lost
        finally:
            for one in descendants(host.pid):
                os.kill(one.pid, signal.SIGKILL)


def test_a_short_command_says_how_it_ended_and_finds_what_it_must_and_nothing_else(tmp_path):
    left = tmp_path / "out" / "records"
    (left / "weights" / "0").mkdir(parents=True)
    words = (
        sys.executable,
        "-c",
        "import os; print(os.environ['X'], sorted(os.listdir('out')), open('out/latest').read()); raise SystemExit(3)",
    )
    (tmp_path / "out" / "gone").touch()
    command = TrainerCommand(
        words=words,
        cwd=tmp_path,
        variables={"X": "given"},
        removes=(left, tmp_path / "out" / "gone", tmp_path / "none"),
        writes={tmp_path / "out" / "latest": "step-5"},
    )
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    assert asyncio.run(run_to_end(command, paths)) == (3, "given ['latest'] step-5")
