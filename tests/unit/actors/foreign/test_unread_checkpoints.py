"""Another project's trainer whose disk gives none of its checkpoints any more: they are waited for, not forgotten."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.foreign import foreign_checkpoints
from actors.foreign.command_cluster import CommandCluster
from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.errors import DiskError, ModelError
from launcher.base.messages import Cause, Incident
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.run_paths import RunPaths
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL
from tests.support.worlds.foreign import Recorded, lines, resume_from


@pytest.fixture
def history():
    return Recorded(events=[], attempts=[])


def of_a_command(tmp_path, history, *steps):
    """Of a command whose checkpoints are whole with a file `done`; seen once while it ran."""
    for step in steps:
        (tmp_path / "out" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"step-{step}" / "done").touch()
    config = RunConfig(experiment_name=EXPERIMENT, trial_name=TRIAL)
    config.cluster.fileroot = str(tmp_path / "runs")
    RunPaths.of(config).prepare()
    config.trainer = ForeignTrainerConfig(
        adapter="command",
        command="x",
        cwd=str(tmp_path),
        pattern="(?P<step>1)",
        checkpoints="out/step-*",
        checkpoint_file="done",
    )
    found = ForeignCheckpoints(config, adapter_of(config.trainer), history, are_ours=True)
    assert [one.step for one in found.seen()] == list(steps)
    return found


async def test_checkpoints_that_a_disk_does_not_give_any_more_are_waited_for_and_nothing_begins_anew(tmp_path, history):
    """As of a disk that is not mounted any more."""
    found, away = of_a_command(tmp_path, history, 5), tmp_path / "away"
    (tmp_path / "out").rename(away)
    trainer = SimpleNamespace(checkpoints=found, steps=SimpleNamespace(lines=lines(9)), close=all_done)
    cluster = CommandCluster(found._config, history, trainer, changed=asyncio.Event())
    assert await cluster._scan.read() is None
    assert await cluster._scan.read() is None
    ((name, facts),) = history.events
    assert (name, "which were there, none is any more" in facts["reason"]) == ("checkpoint.unreadable", True)
    away.rename(tmp_path / "out")
    read = await cluster._scan.read()
    assert [one.global_step for one in found.facts(read, lines(9), None)] == [5]
    await cluster.close()


async def all_done():
    """Nothing runs."""


@pytest.mark.parametrize("fails", ["list", "tensors", "mark"])
def test_of_checkpoints_that_can_not_be_read_nothing_is_known(tmp_path, history, monkeypatch, fails):
    found = of_a_command(tmp_path, history, 5)
    (tmp_path / "out" / "step-5" / "model.safetensors").touch()
    error = OSError(5, "Input/output error")

    def refuse(*_):
        raise error

    def unread(file):
        raise ModelError(f"{file} can't be read: {error.strerror}") from error

    if fails == "list":
        monkeypatch.setattr(found._adapter, "checkpoints", refuse)
    elif fails == "tensors":
        monkeypatch.setattr(foreign_checkpoints, "read_entries", unread)
    else:
        (tmp_path / "out" / "step-5" / "done").unlink()
        monkeypatch.setattr(foreign_checkpoints, "why_unread", lambda file: f"{file} can't be read: {error.strerror}")
    with pytest.raises(DiskError, match="Input/output error"):
        resume_from(found, lines(9))
    assert bool(found.seen()) is (fails != "list")


def test_one_that_can_not_be_read_beside_one_that_can_is_damaged(tmp_path, history, monkeypatch):
    found = of_a_command(tmp_path, history, 5, 6)
    for step in (5, 6):
        (tmp_path / "out" / f"step-{step}" / "model.safetensors").touch()

    def read(file):
        if "step-6" in str(file):
            raise ModelError(f"{file} can't be read") from OSError(5, "Input/output error")

    monkeypatch.setattr(foreign_checkpoints, "read_entries", read)
    assert resume_from(found, lines(9)) == 5
    asyncio.run(found.clear(after=5, is_condemned=False))
    assert [path.name for path in (tmp_path / "out" / "set_aside").iterdir()] == ["step-6.damaged-1"]
    assert [name for name, _ in history.events] == ["checkpoint.damaged", "checkpoint.set_aside"]


def test_one_that_can_not_be_read_now_is_not_passed_over_for_the_beginning(tmp_path, history, monkeypatch):
    """The only one from before an onset, on a disk that gives those after it."""
    found = of_a_command(tmp_path, history, 5, 16)
    for step in (5, 16):
        (tmp_path / "out" / f"step-{step}" / "model.safetensors").touch()

    def read(file):
        if "step-5" in str(file):
            raise ModelError(f"{file} can't be read") from OSError(5, "Input/output error")

    monkeypatch.setattr(foreign_checkpoints, "read_entries", read)
    fell = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="", since=0.0, onset_step=12, is_sharp=True)
    assert found.facts(found.read(lines(20)), lines(20), fell) is None


def test_where_all_were_set_aside_nothing_is_waited_for(tmp_path, history):
    found = of_a_command(tmp_path, history, 5)
    (tmp_path / "out" / "step-5" / "done").unlink()
    for _ in range(2):
        assert resume_from(found, lines(9)) == FIRST_WEIGHTS
        asyncio.run(found.clear(after=FIRST_WEIGHTS, is_condemned=False))
    assert [name for name, _ in history.events] == ["checkpoint.set_aside"]


def test_a_later_attempt_that_finds_none_of_them_does_not_begin_anew(tmp_path, history):
    """As where their disk is not mounted after the machine's restart."""
    found = of_a_command(tmp_path, history, 5)
    assert [found.look_for_proof(1), found.look_for_proof(2)] == ["", ""]
    assert [name for name, _ in history.events] == ["checkpoint.found"]
    (tmp_path / "out").rename(tmp_path / "away")
    with pytest.raises(DiskError, match="which were there, none is any more"):
        resume_from(next_attempt(found, history), lines(9))
    (tmp_path / "away").rename(tmp_path / "out")
    assert resume_from(next_attempt(found, history), lines(9)) == 5


def test_a_later_attempt_than_one_that_set_all_aside_begins_anew(tmp_path, history):
    found = of_a_command(tmp_path, history, 5)
    found.look_for_proof(1)
    (tmp_path / "out" / "step-5" / "done").unlink()
    resume_from(found, lines(9))
    asyncio.run(found.clear(after=FIRST_WEIGHTS, is_condemned=False))
    assert resume_from(next_attempt(found, history), lines(9)) == FIRST_WEIGHTS


def next_attempt(found, history):
    """Of the same run, whose memory has what was recorded."""
    return ForeignCheckpoints(found._config, found._adapter, history, are_ours=True)


def test_a_trainer_without_a_checkpoint_is_told_once_it_should_have_one(tmp_path, history):
    found = of_a_command(tmp_path, history)
    assert found.look_for_proof(foreign_checkpoints.STEPS_WITHOUT - 1) == ""
    assert found.look_for_proof(foreign_checkpoints.STEPS_WITHOUT).endswith(": check trainer.checkpoints=out/step-*")
    found._config.trainer.checkpoints = None  # as chosen
    assert found.look_for_proof(foreign_checkpoints.STEPS_WITHOUT) == ""
