"""A pause of another project's trainer: PAUSED is what it reports itself, and one that waits is not hung."""

import asyncio
import sys
import time

import pytest

from actors.foreign import command_trainer
from launcher.adapters.command_adapter import PAUSED
from launcher.base.errors import RunError
from launcher.base.messages import TerminalStatus
from launcher.config.compose import REPOSITORY
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.policy.observed import RunState
from launcher.run_files.control_requests import ControlRequest, RequestEntry, ask
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.worlds.foreign import coordinator_of, last_step

PROGRAM = """
import json, os, time
from pathlib import Path

def say(**figures):
    with open(os.environ["GRPO_TRAINER_STEPS"], "a") as file:
        print(json.dumps(figures), file=file)

def wanted():
    request = Path(os.environ["GRPO_TRAINER_REQUESTS"])
    return request.exists() and json.loads(request.read_text())["wish"] == "pause"

say(step=0, grpo_paused=False)
for step in range(1, 7):
    while step == 4 and not Path("go").exists():
        time.sleep(0.01)
    if wanted():
        say(step=step - 1, grpo_paused=True)
        while wanted():
            time.sleep(0.01)
        say(step=step - 1, grpo_paused=False)
    say(step=step, reward=0.5)
"""
REASON = "a pause asked by a person"


@pytest.fixture
def config(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    made = RunConfig(experiment_name="e", trial_name="t")
    made.trainer = ForeignTrainerConfig(
        adapter="command", command="python train.py", python=sys.executable, cwd=str(tmp_path), metrics="steps.jsonl"
    )
    return made


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    made.prepare()
    made.keys.mkdir()
    return made


async def until(holds, running):
    give_up_at = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < give_up_at
        assert not running.done()
        await asyncio.sleep(0.02)


async def paused_once(coordinator, folder, paths, waited_for):
    running = asyncio.create_task(coordinator.run())
    await until(lambda: last_step(coordinator) == 3, running)
    ask(paths, RequestEntry(wish=ControlRequest.PAUSE, by="a person"))
    coordinator.hold(REASON)
    (folder / "go").touch()
    await until(lambda: REASON in waited_for, running)  # at the looks that find a hang
    await until(lambda: [one["reason"] for one in lines_of(paths, "trainer.paused")] == [REASON], running)
    states = [coordinator._history.state]
    ask(paths, RequestEntry(wish=ControlRequest.RUN, by="a person"))
    coordinator.hold("")
    return states, await running


def lines_of(paths, name):
    return [line for line in read_lines(paths.events) if line["event"] == name]


def test_a_trainer_that_waits_is_paused_and_owes_no_step(config, paths, tmp_path, monkeypatch):
    waited_for, watch = [], command_trainer.ProgressWatch

    def watched(*parts):
        *others, waits_for = parts
        return watch(*others, lambda: waited_for.append(waits_for()) or waited_for[-1])

    monkeypatch.setattr(command_trainer, "ProgressWatch", watched)
    states, outcome = asyncio.run(paused_once(coordinator_of(config, paths), tmp_path, paths, waited_for))
    assert states == [RunState.PAUSED]
    assert (outcome.status, outcome.last_step) == (TerminalStatus.FINISHED, 6)
    assert [line["global_step"] for line in read_lines(paths.metrics)] == [1, 2, 3, 4, 5, 6]
    said = [(line["state"], line["reason"]) for line in read_lines(paths.events) if "state" in line]
    assert ("PAUSED", REASON) in said


def test_the_page_has_the_names_that_a_trainer_in_any_language_needs():
    page = (REPOSITORY / "docs" / "adapters.md").read_text()
    named = (command_trainer.STEPS, command_trainer.REQUESTS, PAUSED, f'"wish": "{ControlRequest.PAUSE}"')
    assert [name for name in named if name not in page.partition("## A pause")[2]] == []


async def asked_of_one_that_can_not(coordinator, folder):
    running = asyncio.create_task(coordinator.run())
    await until(lambda: last_step(coordinator) == 3, running)
    try:
        coordinator.hold(REASON)
    finally:
        (folder / "go").touch()
        await running


def test_one_that_never_reported_that_it_can_wait_is_refused_with_what_to_do(config, paths, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.replace("say(step=0, grpo_paused=False)", ""))
    with pytest.raises(RunError, match=r"can't be paused") as refused:
        asyncio.run(asked_of_one_that_can_not(coordinator_of(config, paths), tmp_path))
    assert "LauncherCallback" in str(refused.value)
    assert not lines_of(paths, "trainer.paused")


def test_one_that_is_paused_before_it_was_started_is_started_when_that_is_over(config, paths, tmp_path):
    (tmp_path / "go").touch()
    coordinator = coordinator_of(config, paths)

    async def run():
        coordinator.hold(REASON)
        running = asyncio.create_task(coordinator.run())
        await until(lambda: coordinator._history.state is RunState.PAUSED, running)
        started = lines_of(paths, "trainer.starting")
        coordinator.hold("")
        return started, await running

    started, outcome = asyncio.run(run())
    assert started == []
    assert (outcome.status, outcome.last_step) == (TerminalStatus.FINISHED, 6)


def test_a_trainer_that_waits_by_itself_is_given_no_order_to_resume(config, paths, tmp_path):
    """It would be done at once and given again at once, with two lines of the journal each time."""
    text = (tmp_path / "train.py").read_text()
    stays = "while wanted() or not Path('leave').exists():"
    (tmp_path / "train.py").write_text(text.replace("while wanted():", stays))
    (tmp_path / "go").touch()
    coordinator = coordinator_of(config, paths)
    turns, turn = [], coordinator.turn

    async def counted():
        turns.append(1)
        return await turn()

    coordinator.turn = counted

    async def run():
        ask(paths, RequestEntry(wish=ControlRequest.PAUSE, by="a person"))
        running = asyncio.create_task(coordinator.run())
        await until(lambda: coordinator.trainer.is_paused, running)
        turns.clear()
        await until(lambda: len(turns) > 4, running)  # nobody has told the Coordinator of a pause
        ask(paths, RequestEntry(wish=ControlRequest.RUN, by="a person"))
        (tmp_path / "leave").touch()
        return await running

    outcome = asyncio.run(run())
    assert (outcome.status, outcome.last_step) == (TerminalStatus.FINISHED, 6)
    assert len(lines_of(paths, "trainer.resuming")) == 1


def test_a_pause_that_is_taken_back_before_the_trainer_obeyed_is_waited_for_no_longer(config, paths, tmp_path):
    coordinator = coordinator_of(config, paths)

    async def run():
        running = asyncio.create_task(coordinator.run())
        await until(lambda: last_step(coordinator) == 3, running)
        coordinator.hold(REASON)  # in the middle of a step
        await until(lambda: lines_of(paths, "trainer.pausing"), running)
        coordinator.hold("")
        await until(lambda: lines_of(paths, "trainer.pausing_failed"), running)
        (tmp_path / "go").touch()
        return await running

    assert asyncio.run(run()).status is TerminalStatus.FINISHED
    assert not lines_of(paths, "trainer.paused")


def test_a_trainer_that_hangs_in_its_pause_is_restarted_once_the_pause_is_over(config, paths, tmp_path):
    """That it waits was its excuse until it said that it goes on, which one that hangs never says."""
    hangs = """        while not Path("hung").exists():
            Path("hung").touch()
            while True:
                time.sleep(1)
        say(step=step - 1, grpo_paused=False)"""
    (tmp_path / "train.py").write_text(PROGRAM.replace("        say(step=step - 1, grpo_paused=False)", hangs))
    config.health.trainer_min_s = 1.0
    _, outcome = asyncio.run(paused_once(coordinator_of(config, paths), tmp_path, paths, [REASON]))
    assert (outcome.status, outcome.last_step) == (TerminalStatus.FINISHED, 6)
    (restarted,) = lines_of(paths, "trainer.restarting")
    assert "no progress for" in restarted["reason"]
