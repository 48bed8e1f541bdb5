"""Another project's trainer whose disk gives none of its checkpoints any more: they are waited for, not forgotten."""

import asyncio

import pytest

from actors.foreign import checkpoint_disk, foreign_checkpoints
from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.errors import DiskError, ModelError, RunError
from launcher.config.foreign import ForeignTrainerConfig
from launcher.config.schema import RunConfig
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.run_paths import RunPaths
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL
from tests.support.worlds.foreign import Recorded, lines


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


@pytest.mark.parametrize("comes_back", [True, False])
def test_checkpoints_that_a_disk_does_not_give_any_more_are_waited_for_and_nothing_begins_anew(
    tmp_path, history, monkeypatch, comes_back
):
    """As of a disk that is not mounted any more."""
    found, away = of_a_command(tmp_path, history, 5), tmp_path / "away"
    (tmp_path / "out").rename(away)

    async def waited(seconds, asked):
        if comes_back and seconds == 4.0:
            away.rename(tmp_path / "out")

    monkeypatch.setattr(foreign_checkpoints, "within", waited)
    if comes_back:
        assert asyncio.run(found.resume_from(lines(9), None)) == 5
    else:
        with pytest.raises(RunError, match="which were there, none is any more"):
            asyncio.run(found.resume_from(lines(9), None))
    assert len(history.events) == (3 if comes_back else len(foreign_checkpoints.UNREAD_S))
    assert {name for name, _ in history.events} == {"checkpoint.unreadable"}


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
        monkeypatch.setattr(checkpoint_disk, "read_entries", unread)
    else:
        (tmp_path / "out" / "step-5" / "done").unlink()
        monkeypatch.setattr(checkpoint_disk, "why_unread", lambda file: f"{file} can't be read: {error.strerror}")
    monkeypatch.setattr(foreign_checkpoints, "UNREAD_S", (0.0,))
    with pytest.raises(DiskError, match="Input/output error"):
        asyncio.run(found.resume_from(lines(9), None))
    assert bool(found.seen()) is (fails != "list")


def test_one_that_can_not_be_read_beside_one_that_can_is_damaged(tmp_path, history, monkeypatch):
    found = of_a_command(tmp_path, history, 5, 6)
    for step in (5, 6):
        (tmp_path / "out" / f"step-{step}" / "model.safetensors").touch()

    def read(file):
        if "step-6" in str(file):
            raise ModelError(f"{file} can't be read") from OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_disk, "read_entries", read)
    assert asyncio.run(found.resume_from(lines(9), None)) == 5
    asyncio.run(found.clear(after=5, is_condemned=False))
    assert [path.name for path in (tmp_path / "out" / "set_aside").iterdir()] == ["step-6.damaged-1"]


def test_where_all_were_set_aside_nothing_is_waited_for(tmp_path, history):
    found = of_a_command(tmp_path, history, 5)
    (tmp_path / "out" / "step-5" / "done").unlink()
    for _ in range(2):
        assert asyncio.run(found.resume_from(lines(9), None)) == FIRST_WEIGHTS
        asyncio.run(found.clear(after=FIRST_WEIGHTS, is_condemned=False))
    assert [name for name, _ in history.events] == ["checkpoint.set_aside"]


def test_a_later_attempt_that_finds_none_of_them_does_not_begin_anew(tmp_path, history, monkeypatch):
    """As where their disk is not mounted after the machine's restart."""
    found = of_a_command(tmp_path, history, 5)
    assert [found.look(1), found.look(2)] == ["", ""]
    assert [name for name, _ in history.events] == ["checkpoint.found"]
    (tmp_path / "out").rename(tmp_path / "away")
    monkeypatch.setattr(foreign_checkpoints, "UNREAD_S", ())
    with pytest.raises(RunError, match="which were there, none is any more"):
        asyncio.run(next_attempt(found, history).resume_from(lines(9), None))
    (tmp_path / "away").rename(tmp_path / "out")
    assert asyncio.run(next_attempt(found, history).resume_from(lines(9), None)) == 5


def test_a_later_attempt_than_one_that_set_all_aside_begins_anew(tmp_path, history):
    found = of_a_command(tmp_path, history, 5)
    found.look(1)
    (tmp_path / "out" / "step-5" / "done").unlink()
    asyncio.run(found.resume_from(lines(9), None))
    asyncio.run(found.clear(after=FIRST_WEIGHTS, is_condemned=False))
    assert asyncio.run(next_attempt(found, history).resume_from(lines(9), None)) == FIRST_WEIGHTS


def next_attempt(found, history):
    """Of the same run, whose memory has what was recorded."""
    return ForeignCheckpoints(found._config, found._adapter, history, are_ours=True)


def test_a_trainer_without_a_checkpoint_is_told_once_it_should_have_one(tmp_path, history):
    found = of_a_command(tmp_path, history)
    assert found.look(foreign_checkpoints.STEPS_WITHOUT - 1) == ""
    assert found.look(foreign_checkpoints.STEPS_WITHOUT).endswith(": check trainer.checkpoints=out/step-*")
    found._config.trainer.checkpoints = None  # as chosen
    assert found.look(foreign_checkpoints.STEPS_WITHOUT) == ""
