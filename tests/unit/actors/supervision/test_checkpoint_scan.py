"""The disk is read off the control loop: one that stalls delays nothing, and what was changed is read again."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from actors.supervision import checkpoint_scan
from actors.supervision.checkpoint_scan import CheckpointScan
from launcher.base.errors import CheckpointError


class Disk:
    """What is on it, until it stalls or fails."""

    def __init__(self):
        self.holds = ("step 9",)
        self.error = None
        self.turns = threading.Event()
        self.turns.set()
        self.reads = 0
        self.patience_s = 3600.0
        self.told = []

    def read(self):
        self.reads += 1
        found = self.holds
        self.turns.wait(10)
        if self.error is not None:
            raise self.error
        return found

    @asynccontextmanager
    async def scan(self):
        scan = CheckpointScan(self.read, unreadable=self.told.append, patience_s=self.patience_s)
        try:
            yield scan
        finally:
            self.turns.set()
            scan.close()


async def test_while_the_disk_stalls_the_loop_runs_and_nothing_is_chosen_from_what_was_seen_before(monkeypatch):
    """Else `ping` has no answer, and the driver ends a Coordinator that is well, again and again (P7)."""
    monkeypatch.setattr(checkpoint_scan, "SCAN_S", 0.05)
    disk = Disk()
    old, new = ("step 9",), ("step 9", "step 19")
    async with disk.scan() as scan:
        first = await scan.read()
        disk.turns.clear()
        disk.holds = ("step 9", "step 19")
        turns = 0

        async def loop_runs():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        running = asyncio.create_task(loop_runs())
        stalled = await scan.read()
        running.cancel()
        monkeypatch.setattr(checkpoint_scan, "SCAN_S", 3600.0)  # whoever waited for it now would not come back
        again = [await scan.read() for _ in range(20)]
        disk.turns.set()
        await asyncio.wait([scan._reading])
        assert (first, stalled, set(again), turns > 0, await scan.read()) == (old, None, {None}, True, new)
    assert len(disk.told) == 1
    assert "no answer from its disk" in disk.told[0]
    assert disk.reads == 2, "a disk that stalls is not asked again before it has answered"


async def test_what_was_read_before_an_action_ended_is_not_used():
    disk = Disk()
    async with disk.scan() as scan:
        disk.turns.clear()
        reading = asyncio.create_task(scan.read())
        while not disk.reads:
            await asyncio.sleep(0.001)
        disk.holds = ()  # condemned meanwhile
        scan.invalidate()
        disk.turns.set()
        assert await reading == ()
    assert disk.reads == 2


async def test_a_disk_that_never_could_be_read_is_an_error():
    disk = Disk()
    disk.error = CheckpointError("the folder can't be listed")
    with pytest.raises(CheckpointError, match="can't be listed"):
        async with disk.scan() as scan:
            await scan.read()


async def test_a_disk_that_fails_after_it_was_read_is_waited_for_and_not_for_ever():
    """Taken for one that has no checkpoints, it would start the run over."""
    disk = Disk()
    async with disk.scan() as scan:
        assert await scan.read() == ("step 9",)
        disk.error = CheckpointError("the folder can't be listed")
        assert [await scan.read() for _ in range(3)] == [None] * 3
        assert disk.told == ["the folder can't be listed"]
        scan._patience_s = -1.0
        with pytest.raises(CheckpointError, match="can't be listed"):
            await scan.read()


async def test_a_disk_that_stalls_at_the_first_reading_is_waited_for_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(checkpoint_scan, "SCAN_S", 0.05)
    disk = Disk()
    disk.turns.clear()
    async with disk.scan() as scan:
        assert await scan.read() is None
        scan._patience_s = -1.0
        with pytest.raises(CheckpointError, match="has not answered for"):
            await scan.read()


async def test_a_failure_long_after_the_last_one_is_another_trouble(monkeypatch):
    """Between them the plan needed no checkpoints, and the disk may have been well all the time."""
    disk = Disk()
    async with disk.scan() as scan:
        await scan.read()
        disk.error = CheckpointError("the folder can't be listed")
        await scan.read()
        scan._patience_s = -1.0
        monkeypatch.setattr(checkpoint_scan, "AGAIN_S", -1.0)
        assert await scan.read() is None
    assert len(disk.told) == 2
