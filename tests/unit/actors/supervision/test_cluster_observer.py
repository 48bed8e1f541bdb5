"""What the Coordinator sees of a run: of the disk as last known where it can't be read, of damage what it concerns."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from actors.supervision.action_executor import ActionExecutor
from actors.supervision.cluster_observer import ClusterObserver
from launcher.base.errors import CheckpointError
from launcher.base.messages import Cause, TrainerView
from launcher.checkpoints import in_memory_checkpoints
from launcher.checkpoints.checkpoint_catalog import set_aside_by_restore
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.config.schema import RunConfig
from launcher.policy.actions import Halt, RestoreTrainer
from launcher.policy.observed import TRAINER
from launcher.policy.restart_budget import RepairAttempt, Rung, next_repair
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.fake_actors import FakeActor
from tests.support.machine import scaled
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

    def refuse(self, global_step, lineage, incident):
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
        """None: unreadable."""
        found = await self.eyes.checkpoints.read()
        return None if found is None else [facts.global_step for facts in found if facts.is_complete]

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
    assert trial.standing() is None
    assert trial.standing() is None
    back()
    trial.save(19)
    assert trial.standing() == [9, 19]
    away(trial)
    assert trial.standing() is None
    assert len(trial.events("checkpoint.unreadable")) == 2  # once for each time


def test_one_that_never_could_be_read_is_not_taken_for_empty(trial):
    trial.save(9)
    away(trial)
    with pytest.raises(CheckpointError, match="can't be listed"):
        trial.standing()


def test_a_coordinator_that_takes_over_waits_for_a_disk_that_another_could_read(trial):
    """It reads the checkpoints for the first time when something failed: a disk that was away just then ended the
    run."""
    trial.save(9)
    trial.history.begun(RestoreTrainer(global_step=9, reason="the run begins"))
    trial.history.save()
    trial.open()
    back = away(trial)
    assert trial.standing() is None
    back()
    assert trial.standing() == [9]


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
    assert trial.standing() == [19]
    assert not trial.events("checkpoint.damaged")


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
        await trial.eyes.observe_run(is_stopped=False)
    await trial.eyes.close()
    assert ended == [True]


# ── a Coordinator that is killed in the middle of a restore or of a halt ──


class Killed(BaseException):
    """Nothing that comes after it is done."""


def dies(*args, **kwargs):
    raise Killed


def collapsed(trial):
    """Steps from 15 on hold damage; returns the restore to step 9 that goes back from it."""
    for step in (4, 9, 14, 19, 24):
        trial.save(step)
    asyncio.run(trial.history.flush())
    return RestoreTrainer(global_step=9, onset_step=16, condemn_after=14, reason="rewards fell")


def performs(trial, action):
    """As the Coordinator does, which writes first that it begins, until it is killed."""
    trial.history.begun(action)
    with pytest.raises(Killed):
        asyncio.run(trial.hands._do(action))


def kill_before(trial, monkeypatch, moment):
    match moment:
        case "it condemns":
            monkeypatch.setattr(trial.eyes.catalog, "condemn_after", dies)
        case "it says what it condemned":
            condemn = trial.eyes.catalog.condemn_after
            monkeypatch.setattr(trial.eyes.catalog, "condemn_after", lambda *a: (condemn(*a), dies()))
        case "the trainer is asked":
            monkeypatch.setattr(trial.eyes.trainer, "restore", dies)


MOMENTS = ["it condemns", "it says what it condemned", "the trainer is asked"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_restore_whose_coordinator_is_killed_at_any_moment_has_the_same_end(trial, monkeypatch, moment):
    """Where the load came first, nothing would show any more that they hold damage, and a restart would load it."""
    restore = collapsed(trial)
    kill_before(trial, monkeypatch, moment)
    performs(trial, restore)
    assert [c.global_step for c in trial.store.list()] == ([4, 9, 14, 19, 24] if moment == MOMENTS[0] else [4, 9, 14])

    trial.open()  # the successor sees a trainer that still holds the damage, and chooses from what there is
    damaged_left = any(step > 14 for step in trial.standing())
    again = dataclasses.replace(restore, condemn_after=14 if damaged_left else None)
    monkeypatch.setattr(trial.eyes.trainer, "restore", restored)
    trial.history.begun(again)
    asyncio.run(trial.hands._do(again))
    assert trial.standing() == [4, 9, 14]
    aside = sorted(path.name for path in (trial.store.root / "set_aside").iterdir())
    assert [name.partition(".")[2] for name in aside] == ["condemned-1"] * 2
    assert sorted(set_aside_by_restore(trial.paths, aside)) == aside, "and all of it can be put back"


async def restored(global_step, lineage, incident):
    return global_step + 1


@pytest.mark.parametrize("moment", ["it puts back", "it says what it put back", "it ends the trainer", "it is over"])
def test_a_halt_whose_coordinator_is_killed_at_any_moment_puts_back_what_was_set_aside(trial, monkeypatch, moment):
    """P12: what was learned stays where the next command finds it; and no second try takes it away again."""
    restore = collapsed(trial)
    monkeypatch.setattr(trial.eyes.trainer, "restore", restored)
    trial.history.begun(restore)
    asyncio.run(trial.hands._do(restore))
    trial.history.event("trainer.restored", subject="trainer", reason="", global_step=9)
    trial.save(19)  # of the branch that the restore began
    halt = Halt(reason="look at the reward function", reinstate_after=9)
    reinstate = trial.eyes.catalog.reinstate_after
    match moment:
        case "it puts back":
            monkeypatch.setattr(trial.eyes.catalog, "reinstate_after", dies)
        case "it says what it put back":
            monkeypatch.setattr(trial.eyes.catalog, "reinstate_after", lambda step: (reinstate(step), dies()))
        case "it ends the trainer":
            monkeypatch.setattr(trial.hands, "_save", dies)
    if moment == "it is over":
        trial.history.begun(halt)
        asyncio.run(trial.hands._do(halt))
    else:
        performs(trial, halt)

    trial.open()
    asyncio.run(trial.hands._do(Halt(reason="", reinstate_after=trial.history.memory.reinstate_after)))
    assert trial.standing() == [4, 9, 14, 19, 24]
    assert trial.history.memory.ending_reason.count("the same command resumes from the newest") == 1
    assert trial.history.memory.reinstate_after is None


def test_a_halt_that_can_put_nothing_back_says_so_and_ends_the_run(trial, monkeypatch):
    def refuses(step):
        raise CheckpointError("the folder can't be moved")

    monkeypatch.setattr(trial.eyes.catalog, "reinstate_after", refuses)
    halt = Halt(reason="look at the reward function", reinstate_after=9)
    trial.history.begun(halt)
    asyncio.run(trial.hands._do(halt))
    for told in (trial.history.memory.ending_reason, (trial.open(), trial.history.memory.ending_reason)[1]):
        assert told == (
            "look at the reward function; what was set aside after step 9 could not be put back (the folder can't be "
            "moved); the same command resumes from step 9"
        )
    assert trial.history.memory.reinstate_after is None


async def test_a_memory_that_the_disk_refuses_is_trouble_of_the_disk(trial, monkeypatch):
    """Its repairs failed one after the other, and the run ended as one whose server dies again and again."""
    monkeypatch.setattr(trial.eyes, "memory", SimpleNamespace(settings=lambda lengths: None))
    trial.paths.run_memory.mkdir()  # what is written beside it is taken
    trial.history.begin()
    trial.history.save()
    await trial.eyes.observe_run(is_stopped=False)
    await trial.eyes.disks.probed(within_s=scaled(10.0))
    seen = await trial.eyes.observe_run(is_stopped=False)
    trial.paths.run_memory.rmdir()
    trial.history.save()
    await trial.eyes.close()
    assert seen.disk is not None
    assert seen.disk.path == str(trial.paths.run_memory)
    assert trial.history.refusal is None


async def test_steps_that_are_taken_again_after_a_restore_end_the_trouble_of_a_disk(trial, monkeypatch):
    """Until the run was further than ever before, hours later, a second's trouble counted from one that was over, and
    the run ended "for more than disk.patience_s"."""
    monkeypatch.setattr(trial.eyes, "memory", SimpleNamespace(settings=lambda lengths: None))
    stepped = []
    monkeypatch.setattr(trial.eyes.disks, "trouble", lambda now, *, stepped_at, patient: stepped.append(stepped_at))

    async def look_at(next_step, lineage, **more):
        view = TrainerView(pid=1, is_started=True, is_loaded=True, lineage=lineage, next_step=next_step)
        trial.eyes.trainer.view = dataclasses.replace(view, **more)
        await trial.eyes.observe_run(is_stopped=False)
        return stepped[-1]

    assert await look_at(100, 1) is None, "whether it has stepped is not known yet"
    first = await look_at(101, 1)
    assert first is not None
    assert await look_at(0, 1, is_loaded=False) == await look_at(90, 2) == first, "a load is no step"
    assert await look_at(91, 2) > first
    await trial.eyes.close()


async def test_a_restore_that_could_condemn_nothing_does_not_count(trial, monkeypatch):
    """The trainer was never asked, and three moments without the disk of the checkpoints spent the budget: the run
    ended."""

    def refuses(*args):
        raise CheckpointError("the folder of checkpoints can't be listed: Stale file handle")

    monkeypatch.setattr(trial.eyes.catalog, "condemn_after", refuses)
    action = RestoreTrainer(global_step=9, reason="fell", onset_step=15, condemn_after=13)
    for now in (1.0, 2.0, 3.0, 4.0):
        before = next_repair(
            Cause.REWARD_COLLAPSE, TRAINER, trial.history.attempts, trial.config.restart, now=now, progress_at=None
        )
        assert before.rung is Rung.RESTORE
        trial.history.attempted(
            RepairAttempt(
                at=now,
                cause=Cause.REWARD_COLLAPSE,
                subject=TRAINER,
                rung=before.rung,
                onset_step=15,
                restored_step=9,
            )
        )
        trial.history.begun(action)
        with pytest.raises(CheckpointError, match="Stale"):
            await trial.hands._do(action)
        trial.history.failed(action, "it can't be listed", 1.0)
    assert trial.history.attempts == []
    await trial.eyes.close()
