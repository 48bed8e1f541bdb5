"""Another project's trainer under its supervisor: its settings, its events, its rewards that break and are mended."""

import asyncio
import json
import shutil
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save

from actors.foreign.foreign_process import mark_of
from actors.foreign.foreign_supervisor import ForeignSupervisor
from actors.processes.process_tree import bearing
from actors.supervision.incident_tracker import IncidentTracker
from launcher.base.messages import TerminalStatus
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.run_files.control_requests import ControlRequest, RequestEntry, ask
from launcher.run_files.journal import Journal, current_lines, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.foreign.foreign_run import PROGRAM
from tests.support.machine import scaled
from tests.support.run_memory import history_of


def give(folder, value):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(save({"w": torch.full((3,), float(value))}))  # into what is there
    return folder


def remove(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


class Recorded(SimpleNamespace):
    def event(self, name, **facts):
        self.events.append((name, facts))

    @property
    def command_events(self):
        return [{"event": name, **facts} for name, facts in self.events]


def lines(count):
    return [{"global_step": step, "rollout/reward": 0.5, "time": 1.0 + step} for step in range(count)]


STEPS = 60
HELD = "hold-26"
"""The trainer waits before that step until its rewards are broken."""


CHECK = "import os, sys\nos.path.exists('environment') and sys.exit('4 is not 4')"
"""The known answer is scored wrongly while the rewards are broken."""


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    made.prepare()
    made.keys.mkdir(parents=True)
    return made


@pytest.fixture
def config(tmp_path):
    shutil.copy(PROGRAM, tmp_path)
    (tmp_path / "check.py").write_text(CHECK)
    (tmp_path / HELD).touch()
    made = RunConfig(experiment_name="e", trial_name="t")
    made.cluster.fileroot = str(tmp_path / "runs")
    made.restart.restore = 1
    made.reward_health.zero_breaker_steps = 4
    made.reward_health.mend_wait_s = 600.0
    made.trainer = ForeignTrainerConfig(
        adapter="command",
        command=f"{sys.executable} {PROGRAM.name} --steps {STEPS} --metrics log.jsonl --step-s 0.05 --every 1",
        cwd=str(tmp_path),
        metrics="log.jsonl",
        checkpoints="out/step-*",
        checkpoint_file="state.json",
        resume="--resume *",
    )
    return made


def supervisor_of(config, paths):
    journal = Journal(paths.events, 1, time.time)
    history = history_of(paths.events, 1, journal=journal, node="n")
    return ForeignSupervisor(config, paths, journal, history, {})


def events(paths, *names):
    return [event for event in read_lines(paths.events) if event["event"] in names]


async def until(holds, running):
    give_up_at = time.monotonic() + scaled(120)
    while not (found := holds()):
        assert time.monotonic() < give_up_at
        assert not running.done()
        await asyncio.sleep(0.05)
    return found


async def broken(supervisor, tmp_path):
    """The run of `supervisor`, whose rewards are broken from step 26 on."""
    running = asyncio.create_task(supervisor.run())
    await until(lambda: (supervisor.steps.last_step or 0) >= 25, running)
    (tmp_path / "environment").touch()
    (tmp_path / HELD).unlink()
    return running


async def waiting(config, paths, tmp_path):
    """A run whose rewards broke at step 26, until it waits."""
    running = await broken(supervisor_of(config, paths), tmp_path)
    await until(lambda: events(paths, "rewards.awaited"), running)
    return running


def as_killed():
    """One that is cancelled leaves what one that was killed leaves: it ends no incident."""
    return mock.patch.object(IncidentTracker, "close", return_value=None)


def resume(paths, at=1.0):
    ask(paths, RequestEntry(wish=ControlRequest.RUN, by="a test", at=at))


async def mended(config, paths, tmp_path):
    """Its outcome, where a person mends its rewards while it waits, and says so."""
    running = await waiting(config, paths, tmp_path)
    (tmp_path / "environment").unlink()
    resume(paths)
    return await running


def causes(paths):
    return [(event["cause"], event["is_mended"]) for event in events(paths, "incident.ended")]


def assert_sound(outcome, paths, tmp_path):
    assert (outcome.status, outcome.last_step) == (TerminalStatus.FINISHED, STEPS)
    lines = current_lines(read_lines(paths.metrics))
    assert [line["global_step"] for line in lines] == list(range(1, STEPS + 1))
    assert min(line["rollout/reward"] for line in lines) > 0.1
    weight = 1
    for step in range(1, STEPS + 1):
        weight = (weight * 31 + step) % 1_000_003
    assert json.loads((tmp_path / "out" / f"step-{STEPS}" / "state.json").read_text())["weight"] == weight
    assert bearing(mark_of(paths)) == []
    assert not events(paths, "checkpoint.damaged")
