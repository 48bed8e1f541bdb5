"""now.json is written by the actor that leads the run, by its successor where it is killed, and by one at a time."""

import asyncio
import threading
import time

import pytest

from actors.supervision.coordinator_actor import RunActor
from launcher.base.messages import RunOutcome, TerminalStatus, TrainerStatus
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.reporting import current_status
from launcher.reporting.current_status import CurrentStatusFile, DriverFacts, read_now
from launcher.run_files import journal
from launcher.run_files.journal import read_lines
from launcher.run_files.run_memory import MemoryFile
from launcher.run_files.run_paths import RunPaths
from tests.support.health_parts import health_of, server


def at_step(step):
    return TrainerStatus(
        phase="train",
        next_step=step,
        total_steps=9,
        steps_per_epoch=9,
        policy_version=step,
        pid=7,
        seconds_in_phase=0.0,
    )


class Leader(RunActor):
    """Leads a run that the test ends."""

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = None
        self.health = None
        self.leads = asyncio.Event()
        self.is_over = asyncio.Event()

    def _seen(self):
        if isinstance(self.seen, Exception):
            raise self.seen
        return self.seen

    def _health(self):
        return self.health

    async def _lead(self, journal, history):
        self.journal = journal
        self.leads.set()
        await self.is_over.wait()
        return RunOutcome(status=TerminalStatus.FINISHED, reason="all steps are done")


class Trial:
    def __init__(self, folder):
        self.config = RunConfig(experiment_name="status", train_dataset=DatasetConfig(path="none"))
        self.config.cluster.fileroot = str(folder)
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        MemoryFile(self.paths.run_memory).begin(1)
        self.driver = DriverFacts.of_this_process(self.paths, 1, address="auto", is_detached=True)

    def leader(self):
        leader = Leader(self.config, self.paths, 1, self.driver)
        leader.running = asyncio.create_task(leader.run())
        return leader

    async def until(self, holds):
        async with asyncio.timeout(30):
            while (now := read_now(self.paths)) is None or not holds(now):
                await asyncio.sleep(0.01)
        return now

    async def kill(self, leader):
        leader._running.cancel()
        await asyncio.gather(leader.running, leader._running, return_exceptions=True)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    monkeypatch.setattr("actors.supervision.coordinator_actor.EVERY_S", 0.01)
    monkeypatch.setattr("actors.supervision.coordinator_actor.this_node", lambda: "a node")
    return Trial(tmp_path)


async def test_it_says_what_the_driver_said_of_itself_and_what_the_trainer_does(trial):
    leader = trial.leader()
    now = await trial.until(lambda now: now.beat > 1)
    assert (now.pid, now.host) == (trial.driver.pid, trial.driver.host)
    assert (now.address, now.is_detached) == ("auto", True)
    assert now.status is None, "the trainer has not answered"
    leader.seen = (at_step(3), (), ())
    now = await trial.until(lambda now: now.status is not None)
    assert now.status == at_step(3)
    leader.seen = None  # it is being restarted: what was seen last stays
    later = await trial.until(lambda later: later.beat > now.beat + 2)
    assert later.status == at_step(3)
    assert later.elapsed_s > now.elapsed_s
    await trial.kill(leader)


async def test_a_successor_goes_on_with_the_beat_and_keeps_what_was_seen(trial):
    first = trial.leader()
    first.seen = (at_step(3), (), ())
    first.health = health_of(server())
    await trial.until(lambda now: now.health == first.health and now.beat > 3)
    await trial.kill(first)
    left = read_now(trial.paths)
    second = trial.leader()
    now = await trial.until(lambda now: now.beat > left.beat)
    assert (now.status, now.health) == (at_step(3), None), "it has not looked at the run yet"
    assert now.elapsed_s >= left.elapsed_s
    await trial.kill(second)


async def test_the_last_word_is_in_the_file_before_the_outcome_is_known(trial, monkeypatch):
    """The panel of the last step would be missing: who shows the run looks once more, and no more."""
    leader = trial.leader()
    await trial.until(lambda now: now.beat > 1)
    monkeypatch.setattr("actors.supervision.coordinator_actor.EVERY_S", 3600.0)
    leader.seen = (at_step(9), (), ())
    leader.is_over.set()
    await leader.running
    assert read_now(trial.paths).status == at_step(9)


async def test_a_disk_that_takes_no_line_keeps_nobody_from_leading_the_run(trial, monkeypatch):
    """The successor of a Coordinator that was killed waited for the line of its own begin for as long as the disk
    stalled: nobody looked at the run meanwhile, nor at its disk, and it could not be ended."""
    released, append = threading.Event(), journal.append_line
    monkeypatch.setattr(journal, "append_line", lambda *line, **how: released.wait(60) and append(*line, **how))
    monkeypatch.setattr("actors.supervision.run_history.FLUSH_S", 0.05)
    leader = trial.leader()
    async with asyncio.timeout(30):
        await leader.leads.wait()
    assert not trial.paths.events.exists()
    leader.is_over.set()
    assert (await leader.running).status is TerminalStatus.FINISHED
    released.set()
    await leader.journal.flush()


async def test_where_every_thread_waits_for_a_disk_the_outcome_is_known_without_the_last_word(trial, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("actors.supervision.coordinator_actor.FLUSH_S", 0.05)
    monkeypatch.setattr(CurrentStatusFile, "write", lambda file: released.wait(60))
    leader = trial.leader()
    await leader.leads.wait()
    leader.is_over.set()
    async with asyncio.timeout(30):
        assert (await leader.running).status is TerminalStatus.FINISHED
    assert not released.is_set()
    released.set()


async def test_a_defect_in_it_is_recorded_once_and_the_run_goes_on(trial):
    leader = trial.leader()
    leader.seen = KeyError("phase")
    async with asyncio.timeout(30):
        while not (trial.paths.events.exists() and any(_failed(trial.paths))):
            await asyncio.sleep(0.01)
    leader.seen = (at_step(3), (), ())
    await trial.until(lambda now: now.status == at_step(3))
    await leader.journal.flush()
    assert [event["reason"] for event in _failed(trial.paths)] == ["KeyError('phase')"]
    leader.is_over.set()
    assert (await leader.running).status is TerminalStatus.FINISHED


def _failed(paths):
    return [event for event in read_lines(paths.events) if event["event"] == "trainer.snapshot_failed"]


def test_a_driver_that_has_handed_over_writes_no_more_and_still_looks_for_another_run(trial, monkeypatch):
    monkeypatch.setattr(current_status, "EVERY_S", 0.0)
    file = CurrentStatusFile(trial.paths, trial.driver)
    file.write()
    file._writer.join()
    file.hand_over()
    trial.paths.now.write_text("of the Coordinator")
    monkeypatch.setattr(current_status, "held_by_another", lambda paths, lock: "pid 7")
    file.write_if_due()
    file._writer.join()
    assert (trial.paths.now.read_text(), file.another) == ("of the Coordinator", "pid 7")


def test_seconds_are_those_of_the_attempt_also_on_another_machine(trial, monkeypatch):
    began = time.time() - 50.0
    elsewhere = DriverFacts(
        attempt=1,
        host="elsewhere",
        pid=1,
        address="auto",
        is_detached=False,
        began=time.monotonic() + 1e6,  # of another boot
        began_at=began,
        lock=None,
    )
    assert 50.0 <= elsewhere.elapsed_s < 1e5
