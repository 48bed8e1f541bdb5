"""Another project's trainer under a Coordinator: its settings, its events, its rewards that break and are mended."""

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

from actors.foreign.command_cluster import CommandCoordinator
from actors.foreign.command_trainer import CommandTrainer
from actors.foreign.foreign_process import mark_of
from actors.processes.process_tree import bearing
from actors.supervision.incident_tracker import IncidentTracker
from launcher.adapters.foreign_health import report_every
from launcher.base.messages import TerminalStatus
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.policy.restore import choose, for_reports
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
    """In the place of a RunHistory."""

    memory = SimpleNamespace(damaged_checkpoints={})

    def event(self, name, **facts):
        self.events.append((name, facts))

    def found_damaged(self, step, made_at, reason):
        self.events.append(("checkpoint.damaged", {"global_step": step, "reason": reason}))

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
    made.restart.wait_initial_s = 0.1
    made.trainer = ForeignTrainerConfig(
        adapter="command",
        # nobody has to see a sound step before the next one: only the steps at 0 leave time for what they begin
        command=f"{sys.executable} {PROGRAM.name} --steps {STEPS} --metrics log.jsonl --step-s 0.05 "
        "--sound-step-s 0.005 --every 1",
        cwd=str(tmp_path),
        metrics="log.jsonl",
        checkpoints="out/step-*",
        checkpoint_file="state.json",
        resume="--resume *",
    )
    return made


def coordinator_of(config, paths, attempt=1, *, journal=None):
    journal = journal or Journal(paths.events, attempt, time.time)
    history = history_of(paths.events, attempt, journal=journal, node="n")
    changed = asyncio.Event()
    trainer = CommandTrainer(config, paths, attempt, history, {}, changed=changed)
    return CommandCoordinator(config, paths, history, trainer, changed=changed)


def last_step(coordinator):
    return coordinator.trainer.steps.last_step or 0


def resume_from(found, lines, incident=None):
    """The step that a plan would restore, of what lies there. Raises RunError where nothing may be moved."""
    facts = found.facts(found.read(lines), lines, incident)
    settings = for_reports(found._config.restore, report_every(lines))
    step = choose(facts, incident, found._history.attempts, settings).global_step
    found.check(step, lines)
    return step


def events(paths, *names):
    return [event for event in read_lines(paths.events) if event["event"] in names]


async def until(holds, running):
    give_up_at = time.monotonic() + scaled(120)
    while not (found := holds()):
        assert time.monotonic() < give_up_at
        assert not running.done()
        await asyncio.sleep(0.05)
    return found


async def broken(coordinator, tmp_path):
    """The run of `coordinator`, whose rewards are broken from step 26 on."""
    running = asyncio.create_task(coordinator.run())
    await until(lambda: last_step(coordinator) >= 25, running)
    (tmp_path / "environment").touch()
    (tmp_path / HELD).unlink()
    return running


def as_killed():
    """One that is cancelled leaves what one that was killed leaves: it ends no incident."""
    return mock.patch.object(IncidentTracker, "close", return_value=None)


async def given_up(config, paths, tmp_path):
    """A run whose rewards broke at step 26, and which no restore has helped."""
    outcome = await (await broken(coordinator_of(config, paths), tmp_path))
    assert outcome.status is TerminalStatus.ERRORED
    return outcome


async def mended(config, paths, tmp_path):
    """The outcome of the same command, given again once its rewards are mended."""
    await given_up(config, paths, tmp_path)
    (tmp_path / "environment").unlink()
    return await coordinator_of(config, paths, 2).run()


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
