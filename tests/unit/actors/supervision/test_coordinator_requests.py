"""What a person asks of a run is carried out also after an error that nobody foresaw."""

import asyncio
import errno
import os
from types import SimpleNamespace

import pytest

from actors.supervision import coordinator_actor
from actors.supervision.coordinator_actor import follow_requests, follow_restores
from launcher.checkpoints.restore_request import ask_restore
from launcher.policy.actions import RestoreTrainer
from launcher.run_files import control_requests
from launcher.run_files.control_requests import ControlRequest, RequestEntry, ask, wanted
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_memory import RunMemory
from tests.support.worlds.checkpoints import Run


class Asked:
    def __init__(self):
        self.holds = []
        self.aborts = []

    def hold(self, reason):
        self.holds.append(reason)

    def abort(self, reason):
        self.aborts.append(reason)


async def test_an_unexpected_error_is_recorded_once_and_ends_no_later_request(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_actor, "REQUESTS_S", 0.0)
    path, coordinator, reads = tmp_path / "events.jsonl", Asked(), []

    def read():
        reads.append(1)
        if len(reads) <= 3:
            raise RecursionError("too deep")
        return RequestEntry(wish=ControlRequest.STOP, by="somebody")

    following = asyncio.create_task(follow_requests(coordinator, read, Journal(path, 1)))
    async with asyncio.timeout(10):
        while not coordinator.aborts:
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert coordinator.aborts[0] == "asked by somebody"
    assert [event["event"] for event in read_lines(path)] == ["request.failed"]


async def test_a_pause_does_not_end_because_its_file_can_not_be_read(paths, monkeypatch):
    """A network disk that answered one read with an error resumed a run that a person had paused."""
    monkeypatch.setattr(coordinator_actor, "REQUESTS_S", 0.0)
    paths.prepare()
    paths.keys.mkdir(parents=True, mode=0o700)
    ask(paths, RequestEntry(wish=ControlRequest.PAUSE, by="somebody"))
    coordinator, refused = Asked(), []

    class Disk:
        O_RDONLY, O_NOFOLLOW, O_CLOEXEC = os.O_RDONLY, os.O_NOFOLLOW, os.O_CLOEXEC
        fdopen, fstat, geteuid = os.fdopen, os.fstat, os.geteuid

        @staticmethod
        def open(path, flags):
            if len(coordinator.holds) == 1 and len(refused) < 3:
                refused.append(path)
                raise OSError(errno.ESTALE, "Stale file handle")
            return os.open(path, flags)

    monkeypatch.setattr(control_requests, "os", Disk)
    following = asyncio.create_task(follow_requests(coordinator, lambda: wanted(paths), Journal(paths.events, 1)))
    async with asyncio.timeout(10):
        while len(coordinator.holds) < 3:
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert len(refused) == 3
    assert set(coordinator.holds) == {"a pause asked by somebody"}
    (said,) = read_lines(paths.events)
    assert said["event"] == "request.failed"
    assert "Stale file handle" in said["reason"]


async def test_a_restore_is_heard_of_until_its_file_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_actor, "REQUESTS_S", 0.0)
    run, heard = Run(tmp_path), []
    run.save(3)
    asked = ask_restore(run.paths, run.store.find(3), why="by a person", condemn_after=None)
    run.paths.restore.rename(run.paths.restore_taking)
    listener = SimpleNamespace(restore=heard.append)
    following = asyncio.create_task(
        follow_restores(listener, run.paths, Journal(run.paths.events, 1), RunMemory(attempt=1))
    )

    async def hears(wanted):
        heard.clear()
        async with asyncio.timeout(10):
            while wanted not in heard:
                await asyncio.sleep(0.001)

    reason = "a restore to step 3, by a person"
    await hears(RestoreTrainer(global_step=3, reason=reason, restore_count=asked.restore_count))
    run.paths.restore_taking.unlink()
    await hears(None)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("knows", ["memory.json", "events.jsonl"])
async def test_a_restore_that_was_done_before_a_takeover_is_not_asked_for_again(tmp_path, monkeypatch, knows):
    """A Coordinator that was killed before it removed the request: the next one paused and saved for it once more."""
    monkeypatch.setattr(coordinator_actor, "REQUESTS_S", 0.0)
    run, heard = Run(tmp_path), []
    run.save(3)
    asked = ask_restore(run.paths, run.store.find(3), why="by a person", condemn_after=None)
    run.paths.restore.rename(run.paths.restore_taking)
    journal, memory = Journal(run.paths.events, 1), RunMemory(attempt=1)
    if knows == "memory.json":
        memory.restore_taken = asked.restore_count
    else:  # the kill came between the two
        journal.record("recovery.taken", restore_count=asked.restore_count)
        memory.catch_up(read_lines(run.paths.events), is_here=True)
    following = asyncio.create_task(follow_restores(SimpleNamespace(restore=heard.append), run.paths, journal, memory))
    async with asyncio.timeout(10):
        while len(heard) < 2:
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert set(heard) == {None}
    assert not run.paths.restore_taking.exists()
