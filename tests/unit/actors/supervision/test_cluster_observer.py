"""What the Coordinator sees of a run: of the disk as last known where it can't be read, of damage what it concerns."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.supervision.action_executor import ActionExecutor
from actors.supervision.cluster_observer import ClusterObserver
from launcher.base.errors import CheckpointError
from launcher.checkpoints import in_memory_checkpoints
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.config.schema import RunConfig
from launcher.policy.actions import RestoreTrainer
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.fake_actors import FakeActor
from tests.support.run_memory import history_of


class Trial:
    """The eyes on a trial of which there are only files."""

    def __init__(self, folder, monkeypatch):
        (folder / "memory").mkdir()
        monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", folder / "memory")
        self.config = RunConfig(experiment_name="eyes")
        self.config.cluster.fileroot = str(folder / "run")
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        self.store = CheckpointStore(self.paths.default_checkpoints)
        self.trainer = FakeActor(view=lambda: None, restore=self.refuse)
        self.open()

    def open(self):
        """As a Coordinator that begins, or goes on where another one was killed."""
        self.history = history_of(self.paths.events, 1)
        self.eyes = ClusterObserver(
            self.config, self.paths, self.history, servers={}, trainer=self.trainer, monitor=None, memory=None
        )
        self.hands = ActionExecutor(self.config, self.history, self.eyes, shares_gpu=False)

    def refuse(self, global_step, lineage):
        raise CheckpointError(f"the checkpoint of step {global_step} was changed")

    def save(self, step):
        with self.store.staging(CheckpointName(epoch=0, epoch_step=step, global_step=step)) as staged:
            (staged / "weights").write_bytes(b"weights")
            self.store.commit(
                staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={}, keep=False
            )

    def standing(self):
        return asyncio.run(self.seen())

    async def seen(self):
        return [facts.global_step for facts in await self.eyes.checkpoints.latest() if facts.is_complete]

    def events(self, name):
        return [line for line in read_lines(self.paths.events) if line["event"] == name]

    async def restore_fails(self, step):
        with pytest.raises(CheckpointError):
            await self.hands._do(RestoreTrainer(global_step=step, reason="the trainer died"))


@pytest.fixture
def trial(tmp_path, monkeypatch):
    return Trial(tmp_path, monkeypatch)


def away(trial):
    folder = trial.paths.default_checkpoints
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("a disk that is not there")
    return lambda: (folder.unlink(), folder.with_name("elsewhere").rename(folder))


def test_a_disk_that_can_not_be_read_for_a_while_ends_nothing_and_is_not_empty(trial):
    trial.save(9)
    assert trial.standing() == [9]
    back = away(trial)
    assert trial.standing() == [9] and trial.standing() == [9]
    back()
    trial.save(19)
    assert trial.standing() == [9, 19]
    away(trial)
    assert trial.standing() == [9, 19]
    assert len(trial.events("checkpoint.unreadable")) == 2  # once for each time


def test_one_that_never_could_be_read_is_not_taken_for_empty(trial):
    trial.save(9)
    away(trial)
    with pytest.raises(CheckpointError, match="can't be listed"):
        trial.standing()


def test_a_step_that_was_trained_again_is_not_damaged_for_what_lay_there_before(trial):
    """Else each later restore would go back behind it, and throw away sound steps."""
    trial.save(9)
    trial.save(19)
    asyncio.run(trial.restore_fails(19))
    assert trial.standing() == [9]
    trial.open()
    assert trial.standing() == [9]  # whoever takes over knows it too
    trial.store.set_aside_after(9)
    trial.save(19)
    assert trial.standing() == [9, 19]
    asyncio.run(trial.restore_fails(19))
    assert trial.standing() == [9]


def test_no_checkpoint_is_called_damaged_while_the_disk_can_not_be_read(trial):
    trial.save(19)
    assert trial.standing() == [19]
    back = away(trial)
    asyncio.run(trial.restore_fails(19))
    back()
    assert trial.standing() == [19] and not trial.events("checkpoint.damaged")


async def test_a_defect_in_telling_the_trainer_of_a_lost_server_is_raised_and_nothing_is_left_after_close(
    trial, monkeypatch
):
    ended = []

    async def never_told(*args):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def defect(*args):
        raise KeyError("a defect")

    monkeypatch.setattr(trial.eyes.trainer, "call", never_told)
    trial.eyes._tasks.start(trial.eyes._tell_trainer([]))
    await asyncio.sleep(0)
    monkeypatch.setattr(trial.eyes.trainer, "call", defect)
    trial.eyes._tasks.start(trial.eyes._tell_trainer([]))
    await asyncio.sleep(0)
    with pytest.raises(KeyError, match="a defect"):
        await trial.eyes.look(is_stopped=False)
    await trial.eyes.close()
    assert ended == [True]


def test_a_slow_server_is_recorded_once_and_once_when_it_is_as_fast_as_the_others(trial):
    slow = {"server-0": "210 tokens/s, the others 1201"}
    for _ in range(2):
        trial.eyes._note_pace(slow)
    assert [line["reason"] for line in trial.events("server.slow")] == [slow["server-0"]]
    assert not trial.events("server.pace_back")
    for _ in range(2):
        trial.eyes._note_pace({})
    assert len(trial.events("server.pace_back")) == 1


@pytest.mark.parametrize("lost", ["given up", "replaced"])
def test_a_slow_server_that_is_lost_or_replaced_is_not_told_to_be_as_fast_as_it_was(trial, lost):
    slot = trial.eyes.slots["server-0"] = SimpleNamespace(is_over=False, generation=0)
    trial.eyes._note_pace({"server-0": "210 tokens/s, the others 1201"})
    if lost == "given up":
        slot.is_over = True
    else:
        slot.generation = 1
    trial.eyes._note_pace({})
    assert not trial.events("server.pace_back")
