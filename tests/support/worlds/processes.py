"""A host with a real process tree below it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from actors.processes import process_tree
from actors.processes.hosted_process import ProcessHost, ProcessLaunch
from actors.processes.process_tree import Process, bearing, descendants, identify, send
from tests.programs.forked_program import NAME, PLAIN
from tests.support.machine import scaled

TREE = 5
"""Server, child, grandchild and two daemons."""


deadline_s = partial(scaled, 30.0)


ENTRY = (sys.executable, "-S", "-m", NAME)
"""Of a host that forks."""


class World:
    """A tree in a host, and the owner that it belongs to. `forks`: its head is a fork of the host."""

    def __init__(self, folder: Path, *, forks: bool = False) -> None:
        self.owner = subprocess.Popen(["sleep", "1000"])
        self.file = folder / "held open"
        self.scratch = folder / "scratch"
        self.log = folder / "log"
        self.mark = f"HOST_TEST={folder}"
        self.forks = forks
        self.look_s = 0.1  # between two looks of the host
        self.variables: dict[str, str] = {}
        self.host: ProcessHost | None = None

    def made(self, *words: str, grace_s: float = 0.0, vital: str = "", memory_limit: int | None = None):
        head = ENTRY if self.forks else (sys.executable, "-S", "-m") if not words else ()
        tree = ("tests.programs.fake_tree", str(self.file), *([vital] if vital else []))
        of_its_own = {"TMPDIR": str(self.scratch), "LOOK_S": str(self.look_s)}
        return ProcessLaunch(
            command=(*head, *(words or tree)),
            # TMPDIR is the first, as `TMPDIR=… python -m launcher` has it
            environment={"TMPDIR": "", **os.environ, **self.variables, **of_its_own},
            log=self.log,
            mark=self.mark,
            watch=[self.owner.pid],
            grace_s=grace_s,
            vital=vital,
            files=str(self.file.parent / "held"),
            scratch=self.scratch,
            memory_limit=memory_limit,
        )

    async def begin(self, **variables: str) -> None:
        self.variables = variables
        self.host = await ProcessHost.begin(self.made(), ENTRY if self.forks else (*ENTRY, PLAIN))

    async def launch(self, *words: str, **how) -> None:
        if self.host is None or self.host.is_gone():
            await self.begin(**self.variables)
        self.process = await asyncio.wait_for(self.host.start(self.made(*words, **how)), deadline_s())

    async def all_up(self) -> list[Process]:
        """The whole tree below the host, once it is there, one daemon without a mark, and has made its file."""
        async with asyncio.timeout(deadline_s()):
            while True:
                tree = descendants(self.process.host_pid)
                marked = [process for process in bearing(self.mark) if process in tree]
                if len(tree) == TREE > len(marked) and self.file.exists():
                    return tree
                await asyncio.sleep(0.01)

    async def is_watched(self, process: Process) -> None:
        """Until the host has a pidfd of it."""
        async with asyncio.timeout(deadline_s()):
            while process.pid not in pidfds(self.process.host_pid):
                await asyncio.sleep(0.01)

    async def nothing_left(self, tree: list[Process]) -> None:
        async with asyncio.timeout(deadline_s()):
            assert await self.process.wait_swept() == []
        assert [process for process in tree if identify(process.pid) == process] == []

    async def gone(self) -> None:
        """All that bears the mark, the host too."""
        async with asyncio.timeout(deadline_s()):
            await self.host.end()
            while bearing(self.mark):
                await asyncio.sleep(0.01)


def pidfds(pid: int) -> set[int]:
    """Whose pidfds a process has, pidfd_open(2)."""
    found = set()
    for file in (process_tree.PROC / str(pid) / "fdinfo").iterdir():
        with contextlib.suppress(OSError):  # it was closed since
            found |= {int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("Pid:")}
    return found


@pytest.fixture(params=["run", "forked"])
def world(tmp_path, request):
    world = World(tmp_path, forks=request.param == "forked")
    yield world
    end(world)


@pytest.fixture
def forked(tmp_path):
    world = World(tmp_path, forks=True)
    yield world
    end(world)


def end(world):
    world.owner.kill()
    world.owner.wait()
    for process in bearing(world.mark):
        send(process, signal.SIGKILL)


async def until(holds):
    async with asyncio.timeout(deadline_s()):
        while not holds():
            await asyncio.sleep(0.01)
