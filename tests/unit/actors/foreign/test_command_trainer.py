"""The Coordinator with a stand-in for AReaL's launcher and trainer (tests/programs/areal_stand_in.py): real processes,
a process host, no Ray. With the driver and Ray: tests/ray/foreign/test_foreign_areal.py."""

import asyncio
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.foreign import command_cluster, command_trainer, foreign_process
from actors.foreign.command_cluster import CommandCluster
from actors.foreign.foreign_process import TreeWatch, mark_of
from actors.processes.process_tree import bearing, command_line, stat_fields
from actors.supervision import run_history
from launcher.base.errors import RunError
from launcher.base.messages import TerminalStatus
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.policy.actions import Halt
from launcher.run_files import journal as journal_module
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.machine import all_turns, scaled
from tests.support.run_memory import history_of
from tests.support.worlds.adapters import YAML
from tests.support.worlds.foreign import coordinator_of, events, last_step

STAND_IN = Path(__file__).parents[3] / "programs" / "areal_stand_in.py"


@pytest.fixture
def config(tmp_path):
    launcher = tmp_path / "areal" / "infra" / "launcher" / "local.py"
    launcher.parent.mkdir(parents=True)
    for target in (launcher, tmp_path / "train.py"):
        shutil.copy(STAND_IN, target)
    (tmp_path / "their.yaml").write_text(YAML.format(experiment="e", trial="t", root=tmp_path / "out"))
    made = RunConfig(experiment_name="e", trial_name="t")
    made.restart.wait_initial_s = 0.1
    made.trainer = ForeignTrainerConfig(
        adapter="areal",
        command="train.py",
        config="their.yaml",
        python=sys.executable,
        cwd=str(tmp_path),
        env={"PYTHONPATH": str(tmp_path)},
    )
    return made


def of_sleeping_command(folder):
    """The Coordinator of a command that never ends by itself, and the paths of its run."""
    config = RunConfig(experiment_name="e", trial_name="t")
    config.trainer = ForeignTrainerConfig(
        adapter="command", command="sleep 3600", pattern=r"step (?P<step>\d+)", cwd=str(folder)
    )
    paths = RunPaths(fileroot=folder / "runs", user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    return coordinator_of(config, paths), paths


def rank(paths):
    """The trainer; its worker has the same command line, and the trainer for a parent, or the host."""
    alike = {one.pid for one in bearing(mark_of(paths)) if command_line(one)[1:3] == ["-u", "train.py"]}
    shells = {one.pid for one in bearing(mark_of(paths)) if command_line(one)[1:2] == ["-c"]}
    return next((pid for pid in alike if (fields := stat_fields(pid)) and int(fields[1]) in shells), None)


def server(paths):
    return next((one.pid for one in bearing(mark_of(paths)) if command_line(one)[-1:] == ["server"]), None)


def deaths(paths):
    return [event for event in read_lines(paths.events) if event["event"] == "trainer.died"]


async def until(find, running):
    give_up_at = time.monotonic() + 120
    while not (found := find()):
        assert time.monotonic() < give_up_at
        assert not running.done()
        await asyncio.sleep(0.05)
    return found


async def disturbed(config, paths):
    paths.prepare()
    coordinator = coordinator_of(config, paths)
    running = asyncio.create_task(coordinator.run())
    for number, (step, find) in enumerate(((8, rank), (18, server)), 1):
        await until(lambda step=step: last_step(coordinator) >= step, running)
        os.kill(await until(lambda find=find: find(paths), running), signal.SIGKILL)
        await until(lambda number=number: len(deaths(paths)) == number, running)
    return await running


@pytest.mark.slow
def test_a_lost_trainer_and_a_lost_server_cost_no_step_and_leave_no_orphan(config, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_process, "GONE_S", scaled(5))  # the command has its time to end with exit code 1
    paths = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    outcome = asyncio.run(disturbed(config, paths))
    assert (outcome.status, outcome.last_step) == (TerminalStatus.FINISHED, 39)
    assert bearing(mark_of(paths)) == []
    died = deaths(paths)
    assert "the command lives on" in died[0]["reason"]
    assert died[0]["exit_code"] is None
    assert died[1]["exit_code"] == 1
    ended = [event for event in read_lines(paths.events) if event["event"] == "incident.ended"]
    assert [(event["cause"], event["is_mended"]) for event in ended] == [("trainer_crash", True)] * 2


def test_a_last_step_whose_line_has_no_end_counts(tmp_path):
    config = RunConfig(experiment_name="e", trial_name="t")
    config.trainer = ForeignTrainerConfig(
        adapter="command", command=r"printf '\rstep 1\rstep 2'", pattern=r"step (?P<step>\d+)", cwd=str(tmp_path)
    )
    paths = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    outcome = asyncio.run(coordinator_of(config, paths).run())
    assert (outcome.status, outcome.last_step) == (TerminalStatus.FINISHED, 2)
    assert [line["global_step"] for line in read_lines(paths.metrics)] == [1, 2]


def test_a_checkpoint_that_no_run_has_seen_ends_the_run_before_it_starts_and_is_not_moved(tmp_path):
    (tmp_path / "out" / "step-5").mkdir(parents=True)
    config = RunConfig(experiment_name="e", trial_name="t")
    config.trainer = ForeignTrainerConfig(
        adapter="command", command="true", pattern="(?P<step>1)", checkpoints="out/step-*", cwd=str(tmp_path)
    )
    paths = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    outcome = asyncio.run(coordinator_of(config, paths).run())
    assert outcome.status is TerminalStatus.ERRORED
    assert "this run has not made it; nothing is moved" in outcome.reason
    assert (tmp_path / "out" / "step-5").is_dir()
    names = [event["event"] for event in read_lines(paths.events)]
    assert "trainer.starting" not in names
    assert names.count("incident.began") == names.count("incident.ended")
    assert names.index("run.halting") < names.index("run.shutting_down")


def test_what_the_trainer_refuses_while_the_run_is_being_ended_changes_nothing_of_its_end(tmp_path):
    coordinator, _ = of_sleeping_command(tmp_path)

    async def refuses(*, reinstates):
        coordinator._cluster._unusable = RunError("as a restore under way", "no")

    coordinator.trainer.halt = refuses

    async def run():
        running = asyncio.create_task(coordinator.run())
        await until(lambda: coordinator.trainer.pid, running)
        coordinator.abort("asked by a test")
        return await running

    outcome = asyncio.run(run())
    assert (outcome.status, outcome.reason) == (TerminalStatus.ABORTED, "asked by a test")


@pytest.mark.parametrize("where", ["before its process", "with its process half made"])
async def test_a_command_whose_run_ends_while_it_is_started_is_not_left_running(tmp_path, monkeypatch, where):
    """Halt found no process, and the order to start, which waited for the door or the disk, started one after it."""
    coordinator, paths = of_sleeping_command(tmp_path)
    trainer, made, is_starting, may_go_on = coordinator.trainer, [], asyncio.Event(), asyncio.Event()

    async def held():
        is_starting.set()
        await may_go_on.wait()

    async def start(*given, **more):
        if where == "with its process half made":
            await held()
        made.append(await foreign_process.start(*given, **more))
        return made[-1]

    flush = coordinator._history.flush

    async def flushed():
        if where == "before its process" and events(paths, "trainer.starting") and not is_starting.is_set():
            await held()
        await flush()

    monkeypatch.setattr(command_trainer, "start", start)
    monkeypatch.setattr(coordinator._history, "flush", flushed)
    running = asyncio.create_task(coordinator.run())
    await asyncio.wait_for(is_starting.wait(), scaled(30))
    halting = asyncio.create_task(trainer.halt(reinstates=False))
    await all_turns()
    may_go_on.set()
    await asyncio.wait_for(halting, scaled(30))
    await until(lambda: events(paths, "trainer.resumed", "trainer.resuming_failed"), running)
    assert len(made) == (where == "with its process half made")
    assert trainer.pid == 0
    assert bearing(mark_of(paths)) == [], "nothing of it is left when the halt is done"
    coordinator.abort("asked by a test")
    outcome = await asyncio.wait_for(running, scaled(60))
    assert (outcome.status, outcome.reason) == (TerminalStatus.ABORTED, "asked by a test")


async def test_a_disk_that_stalls_at_the_end_keeps_the_outcome_from_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(run_history, "FLUSH_S", 0.05)
    works, append = threading.Event(), journal_module.append_line

    def stalls(path, record, **more):
        if record.get("event") == "run.halting":
            works.wait(scaled(10.0))
        append(path, record, **more)

    monkeypatch.setattr(journal_module, "append_line", stalls)
    config = RunConfig(experiment_name="e", trial_name="t")
    config.trainer = ForeignTrainerConfig(
        adapter="command", command="echo step 1", pattern=r"step (?P<step>\d+)", cwd=str(tmp_path)
    )
    paths = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    journal = Journal(paths.events, 1, time.time, in_background=True)
    outcome = await coordinator_of(config, paths, journal=journal).run()
    is_stalled = bool(journal.unwritten())
    works.set()
    assert (outcome.status, is_stalled) == (TerminalStatus.FINISHED, True)


async def test_a_trainer_that_can_not_be_halted_costs_its_own_time_and_not_that_of_the_servers(tmp_path, monkeypatch):
    """Whoever reads its steps hung on their disk: the halt stood for half an hour, which is the time that a trainer of
    the launcher's own may take to save."""
    monkeypatch.setattr(command_cluster, "STOP_S", 0.02)
    monkeypatch.setattr(command_cluster, "LAST_ORDER_S", 0.02)
    halted, history = [], history_of(tmp_path / "events.jsonl")

    async def never(**_):
        await asyncio.Event().wait()

    async def halts(action):
        halted.append(action)

    trainer = SimpleNamespace(halt=never, stop_s=0.0, checkpoints=None, steps=None)
    servers = SimpleNamespace(perform=halts, deadline_s=lambda action: 1920.0)
    monkeypatch.setattr(command_cluster, "ActionExecutor", lambda *_, **__: servers)
    cluster = CommandCluster(RunConfig(experiment_name="e"), history, trainer, changed=asyncio.Event(), fleet=object())
    await asyncio.wait_for(cluster.perform(Halt(reason="ended by the user")), scaled(30))
    assert [type(one) for one in halted] == [Halt]
    (failed,) = [one for one in read_lines(tmp_path / "events.jsonl") if one["event"] == "actor.stop_failed"]
    assert failed["reason"] == "no answer in time"


PRINTS = """
import sys, time
from pathlib import Path

begin = int(sys.argv[1].split("-")[-1]) if sys.argv[1:] else 0
for step in range(begin + 1, 9):
    while step == 4 and not Path("go").exists():
        time.sleep(0.01)
    print(f"step {step} reward 0.5", flush=True)
    Path(f"at-{step}").mkdir()
    Path(f"at-{step}/whole").touch()
    while step == 6 and not begin:
        time.sleep(1)
"""


def test_what_a_trainer_reported_before_it_was_ended_as_hung_counts(tmp_path):
    """What it prints comes through its host, which is stopped here. The checkpoint that is resumed from is of a step
    that was not seen before: those up to it were missing for good."""
    (tmp_path / "train.py").write_text(PRINTS)
    config = RunConfig(experiment_name="e", trial_name="t")
    config.restart.wait_initial_s = 0.1
    config.health.trainer_min_s = 1.0
    config.trainer = ForeignTrainerConfig(
        adapter="command",
        command="python train.py",
        python=sys.executable,
        cwd=str(tmp_path),
        pattern=r"step (?P<step>\d+) reward (?P<reward>\S+)",
        checkpoints="at-*",
        checkpoint_file="whole",
        resume="*",
    )
    paths = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    coordinator = coordinator_of(config, paths)

    async def run():
        running = asyncio.create_task(coordinator.run())
        await until(lambda: last_step(coordinator) == 3, running)
        os.kill(coordinator.trainer._process.host_pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        return await running

    outcome = asyncio.run(run())
    assert outcome.status is TerminalStatus.FINISHED
    (restored,) = [one["global_step"] for one in events(paths, "trainer.restored")]
    assert restored == 6
    assert [line["global_step"] for line in read_lines(paths.metrics)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_it_looks_once_in_an_interval_at_a_command_that_has_no_rank_yet(tmp_path, monkeypatch):
    config = RunConfig(experiment_name="e", trial_name="t")
    config.trainer = ForeignTrainerConfig(
        adapter="command",
        command="sh -c 'sleep 1.5; until [ -e looked ]; do sleep 0.05; done'",
        pattern=r"step (?P<step>\d+)",
        cwd=str(tmp_path),
    )
    looks, look = [], TreeWatch.look_at_tree

    def looked(self):
        looks.append(time.monotonic())
        if len(looks) == 2:
            (tmp_path / "looked").touch()
        return look(self)

    monkeypatch.setattr(TreeWatch, "look_at_tree", looked)
    paths = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    paths.prepare()
    outcome = asyncio.run(asyncio.wait_for(coordinator_of(config, paths).run(), scaled(60)))
    assert outcome.status is TerminalStatus.FINISHED
    assert 2 <= len(looks) <= 2 + (looks[-1] - looks[0]) / config.health.look_interval_s
