"""The journal is written off the control loop, in order, and what was decided is on the disk before it is done."""

import asyncio
import threading

import pytest

from actors.foreign.command_cluster import CommandCoordinator
from actors.supervision import run_history
from actors.supervision.coordinator import Coordinator
from launcher.base.messages import Cause
from launcher.policy.actions import Halt, PauseTrainer, RestartServer, ResumeTrainer
from launcher.policy.restart_budget import RepairAttempt, Rung
from launcher.run_files import journal as journal_module
from launcher.run_files import run_memory
from launcher.run_files.journal import Journal, read_lines
from tests.support.machine import all_turns
from tests.support.run_memory import history_of
from tests.support.simulated_run.run_model import CONFIG, ModelHands, RunModel


class StalledDisk:
    def __init__(self, monkeypatch):
        self.turns = threading.Event()
        append = journal_module.append_line

        def stalls(*args, **kwargs):
            self.turns.wait(10)
            append(*args, **kwargs)

        monkeypatch.setattr(journal_module, "append_line", stalls)


async def test_a_disk_that_stalls_delays_actions_and_not_the_loop(tmp_path, monkeypatch):
    path, run = tmp_path / "events.jsonl", RunModel()
    history = history_of(path, journal=Journal(path, 1, in_background=True))
    hands = ModelHands(run, history)
    coordinator = Coordinator(CONFIG, hands, history, clock=lambda: run.now)
    history.begin()
    await hands.begin()
    disk = StalledDisk(monkeypatch)  # from here on: each first start of a server waits for its line
    for _ in range(5):
        run.now += 1.0
        await coordinator.turn()
        await all_turns()
    begun, done_while_stalled = len(coordinator._under_way), list(hands.done)
    disk.turns.set()
    async with asyncio.timeout(10):
        while not hands.done:
            await asyncio.sleep(0.005)
    on_disk = [event["event"] for event in read_lines(path)]
    await coordinator._drop_tasks()
    assert begun > 0
    assert done_while_stalled == []
    assert "trainer.restoring" in on_disk, "an action was carried out before it was on the disk"


async def test_a_run_is_paused_and_ended_although_the_disk_of_its_journal_stalls(tmp_path, monkeypatch):
    disk, path = StalledDisk(monkeypatch), tmp_path / "events.jsonl"
    monkeypatch.setattr(run_history, "FLUSH_S", 0.05)
    run = RunModel()
    history = history_of(path, journal=Journal(path, 1, in_background=True))
    hands = ModelHands(run, history)
    hands.patience_s = 0.5
    coordinator = Coordinator(CONFIG, hands, history, clock=lambda: run.now)
    history.begin()
    await coordinator._perform(PauseTrainer(reason="a write does not return"))
    await coordinator._perform(ResumeTrainer())
    await coordinator._perform(Halt(reason="for more than disk.patience_s"))
    disk.turns.set()
    done = hands.done
    assert [type(action) for action in done] == [PauseTrainer, Halt], "a resume waits for its line"


async def test_what_one_turn_decides_is_remembered_at_once_or_not_at_all(tmp_path, monkeypatch):
    """A repair was counted, and its order forgotten, where the Coordinator was killed between the two lines."""
    path, saved, replace = tmp_path / "events.jsonl", [], run_memory.replace_file

    def replaced(file, content, **more):
        if file.parent == tmp_path:  # a writer of the test before may not be done
            saved.append(len([*read_lines(path)]))
        replace(file, content, **more)

    monkeypatch.setattr(run_memory, "replace_file", replaced)
    history = history_of(path, journal=Journal(path, 1, in_background=True))
    repair = RepairAttempt(at=1.0, cause=Cause.SERVER_CRASH, subject="server-0", rung=Rung.SERVER)
    history.attempted(repair)
    history.begun(RestartServer(name="server-0", reason="killed"))
    await history.flush()
    history.event("server.room_back", subject="server-0", reason="nothing that is remembered")
    await history.flush()
    assert saved == [2], "once, behind both lines"


async def test_of_what_waited_for_a_stalled_disk_the_newest_is_written(tmp_path, monkeypatch):
    disk, path, saved = StalledDisk(monkeypatch), tmp_path / "events.jsonl", []
    monkeypatch.setattr(run_memory, "replace_file", lambda file, content, **_: saved.append((file, content)))
    history = history_of(path, journal=Journal(path, 1, in_background=True))
    for generation in range(20):
        history.started_server("server-0", generation, 0, 1)
        history.save()
    disk.turns.set()
    await history.flush()
    assert [b'"server-0":19' in content for file, content in saved if file.parent == tmp_path] == [True]


async def test_lines_keep_their_order_and_a_caller_that_gives_up_takes_none_with_it(tmp_path, monkeypatch):
    disk, path = StalledDisk(monkeypatch), tmp_path / "events.jsonl"
    journal = Journal(path, 1, in_background=True)
    for number in range(5):
        journal.record(f"event.{number}")
    waiting = asyncio.create_task(journal.flush())
    await all_turns()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    disk.turns.set()
    journal.record("event.5")
    await journal.flush()
    assert [event["event"] for event in read_lines(path)] == [f"event.{number}" for number in range(6)]


@pytest.mark.parametrize(("kind", "is_repaired"), [(Coordinator, False), (CommandCoordinator, True)])
async def test_what_a_successor_would_not_know_of_is_not_begun_and_the_run_can_be_ended(
    tmp_path, monkeypatch, kind, is_repaired
):
    """The disk took the lines of events, and refused the memory. A command of another project steps on meanwhile, and
    needs its servers."""

    def refuses(path, data, **_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(run_memory, "replace_file", refuses)
    run = RunModel()
    history = history_of(path, journal=Journal(path, 1, in_background=True))
    hands = ModelHands(run, history)
    coordinator = object.__new__(kind)
    Coordinator.__init__(coordinator, CONFIG, hands, history)
    history.begin()
    for action in (PauseTrainer(reason="full"), RestartServer(name="server-0", reason="it died"), Halt(reason="full")):
        history.begun(action)
        await coordinator._perform(action)
    repairs = [RestartServer] if is_repaired else []
    assert [type(action) for action in hands.done] == [PauseTrainer, *repairs, Halt]
    failed = [event["reason"] for event in read_lines(path) if event["event"] == "server.restarting_failed"]
    assert len(failed) == 1 - len(repairs)
    assert all("memory.json can't be written" in reason for reason in failed)
