"""The guard with real process trees: whoever is killed, nothing is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest

from actors.processes import process_tree
from actors.processes.guarded_process import GuardedProcess, ProcessLaunch
from actors.processes.process_tree import Process, bearing, descendants, identify, send, wait_ended
from launcher.base.errors import ServerError
from tests.support.guards import has_looked
from tests.support.machine import scaled

TREE = 5
"""Server, child, grandchild and two daemons."""
deadline_s = partial(scaled, 30.0)


class World:
    """A guarded tree, and the owner that it belongs to."""

    start = staticmethod(GuardedProcess.launch)

    def __init__(self, folder: Path) -> None:
        self.owner = subprocess.Popen(["sleep", "1000"])
        self.file = folder / "held open"
        self.scratch = folder / "scratch"
        self.log = folder / "log"
        self.mark = f"GUARD_TEST={folder}"

    async def launch(self, *command: str, grace_s: float = 0.0, vital: str = "") -> None:
        module = [sys.executable, "-S", "-m", "tests.programs.fake_tree", str(self.file), *([vital] if vital else [])]
        self.process = await self.start(
            ProcessLaunch(
                command=command or module,
                environment=dict(os.environ),
                log=self.log,
                mark=self.mark,
                watch=[self.owner.pid],
                grace_s=grace_s,
                vital=vital,
                files=str(self.file.parent / "held"),
                scratch=self.scratch,
            )
        )
        self.guards = [identify(self.process.guard_pid), identify(self.process.sentinel_pid)]

    async def all_up(self) -> list[Process]:
        """The whole tree below the guard, once it is there, one daemon without a mark, and has made its file."""
        async with asyncio.timeout(deadline_s()):
            while True:
                tree = descendants(self.process.guard_pid)
                marked = [process for process in bearing(self.mark) if process in tree]
                if len(tree) == TREE > len(marked) and self.file.exists():
                    return tree
                await asyncio.sleep(0.01)

    async def is_watched(self, process: Process) -> None:
        """Until the guard has a pidfd of it."""
        async with asyncio.timeout(deadline_s()):
            while process.pid not in pidfds(self.process.guard_pid):
                await asyncio.sleep(0.01)

    async def nothing_left(self, tree: list[Process]) -> None:
        async with asyncio.timeout(deadline_s()):
            assert await self.process.wait_swept() == []
            assert await asyncio.to_thread(wait_ended, [p for p in self.guards if p], deadline_s())
        assert [process for process in tree if identify(process.pid) == process] == []


def pidfds(pid: int) -> set[int]:
    """Whose pidfds a process has, pidfd_open(2)."""
    found = set()
    for file in (process_tree.PROC / str(pid) / "fdinfo").iterdir():
        with contextlib.suppress(OSError):  # it was closed since
            found |= {int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("Pid:")}
    return found


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.owner.kill()
    world.owner.wait()
    for process in [*process_tree.bearing(world.mark), *(p for p in getattr(world, "guards", []) if p)]:
        send(process, signal.SIGKILL)


VICTIMS = {
    "owner": lambda world: world.owner.pid,
    "guard": lambda world: world.process.guard_pid,
    "sentinel": lambda world: world.process.sentinel_pid,
    "server": lambda world: world.process.pid,
}


def how_it_ends(world: World, victim: str) -> tuple[int | None, str]:
    """Exit code and cause of the server, when the victim was killed."""
    return {
        "owner": (-9, f"the process that it belongs to (pid {world.owner.pid}) is gone"),
        "guard": (None, f"its guard (pid {world.process.guard_pid}) was killed"),
        "sentinel": (-9, f"its sentinel (pid {world.process.sentinel_pid}) is gone"),
        "server": (-9, ""),
    }[victim]


async def test_a_command_that_ends_at_once_was_started_and_has_its_exit_code(world):
    for _ in range(5):
        await world.launch("false")
        assert (await world.process.wait_ended()).exit_code == 1
        await world.nothing_left([])


@pytest.mark.parametrize("victim", VICTIMS)
async def test_whoever_is_killed_nothing_is_left(world, victim):
    await world.launch()
    tree = await world.all_up()
    os.kill(VICTIMS[victim](world), signal.SIGKILL)
    await world.nothing_left(tree)
    ended = world.process.ended
    assert (ended.exit_code, ended.cause) == how_it_ends(world, victim)
    assert not world.scratch.exists()


@pytest.mark.slow
async def test_a_stopped_guard_is_no_way_out(world):
    """SIGSTOP on the guard, then its owner dies: the sentinel sees to it."""
    await world.launch()
    tree = await world.all_up()
    os.kill(world.process.guard_pid, signal.SIGSTOP)
    world.owner.kill()
    world.owner.wait()
    await world.nothing_left(tree)


async def test_ending_ends_the_whole_tree_and_can_be_repeated(world):
    await world.launch()
    tree = await world.all_up()
    assert await world.process.end() == []
    await world.nothing_left(tree)
    assert await world.process.end() == []
    assert world.process.ended.cause == "told to stop"


async def test_within_its_grace_a_server_ends_in_its_own_way(world):
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up'); time.sleep(1000)"
    await world.launch(sys.executable, "-S", "-u", "-c", script, grace_s=deadline_s())
    async with asyncio.timeout(deadline_s()):
        while not world.log.exists() or "up" not in world.log.read_text():
            await asyncio.sleep(0.01)
    await world.process.end()
    assert world.process.ended.exit_code == 5


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)])
async def test_a_servers_own_end_is_told_with_its_exit_code(world, script, code):
    await world.launch(sys.executable, "-S", "-c", script)
    before = time.monotonic()
    ended = await world.process.wait_ended()
    await world.nothing_left([])
    assert (ended.exit_code, ended.cause) == (code, "")
    assert before - deadline_s() < ended.monotonic <= time.monotonic()


@pytest.mark.parametrize("number", ["SIGQUIT", "SIGINT", "SIGHUP", "SIGUSR1"])
async def test_signals_to_the_servers_parent_are_not_meant_for_the_guard(world, number):
    """SGLang's scheduler sends its parent SIGQUIT when it fails: the guard, once the server has ended."""
    script = f"import os, signal; os.kill(os.getppid(), signal.{number}); raise SystemExit(3)"
    await world.launch(sys.executable, "-S", "-c", script)
    await world.nothing_left([])
    assert world.process.ended.exit_code == 3


@pytest.mark.slow
async def test_the_death_of_a_vital_child_ends_the_server(world):
    """SGLang's main process lingers for seconds after its scheduler's death."""
    vital = [sys.executable, "-S", "-c", VITAL_CHILD]
    await world.launch(*vital, vital="vital::")
    async with asyncio.timeout(deadline_s()):
        while not (found := [p for p in descendants(world.process.pid) if process_tree.name(p) == "vital::one"]):
            await asyncio.sleep(0.01)
    await world.is_watched(found[0])
    send(found[0], signal.SIGKILL)
    await world.nothing_left(found)
    pid = found[0].pid
    assert world.process.ended.cause == f"its vital::one (pid {pid}) is gone"


VITAL_CHILD = """
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"vital::one", 0, 0, 0)
time.sleep(1000)
"""


async def test_files_of_the_tree_are_removed_and_those_of_others_are_not(world):
    """Who made the other's file, and whether it is open, can't be seen in a container that shares its folder alone."""
    earlier, others = world.file.with_name("held before"), world.file.with_name("held by another")
    earlier.touch()
    await world.launch()
    tree = await world.all_up()
    others.touch()
    await has_looked(world.process.sentinel_pid)
    (world.scratch / "left").write_text("behind")
    os.kill(world.process.pid, signal.SIGKILL)
    await world.nothing_left(tree)
    assert not world.file.exists()
    assert not world.scratch.exists()
    assert earlier.exists()
    assert others.exists()


async def test_a_file_of_the_tree_that_another_process_holds_open_stays(world):
    await world.launch()
    tree = await world.all_up()
    with world.file.open():
        await has_looked(world.process.sentinel_pid)
        os.kill(world.process.pid, signal.SIGKILL)
        await world.nothing_left(tree)
    assert world.file.exists()


@pytest.mark.slow
def test_files_of_a_living_server_of_another_pid_namespace_stay(tmp_path):
    """In /dev/shm, which both see, while neither sees the other's processes."""
    prefix = f"guard_test_{os.getpid()}_"
    others, ours = (Path("/dev/shm") / f"{prefix}{whose}" for whose in ("others", "ours"))
    inside = [sys.executable, "-m", "tests.programs.guarded_elsewhere", str(tmp_path), str(ours)]
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *inside]
    with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as elsewhere:
        try:
            if elsewhere.stdout.readline() != "up\n":
                said = elsewhere.stderr.read()
                if "unshare" in said:
                    pytest.skip(f"a PID namespace needs root: {said}")
                pytest.fail(said)
            with others.open("w"):
                assert elsewhere.communicate("\n", timeout=deadline_s()) == ("", "")
                assert elsewhere.returncode == 0
                assert others.exists()
                assert not ours.exists()
        finally:
            elsewhere.kill()
            for file in (others, ours):
                file.unlink(missing_ok=True)


async def test_what_an_earlier_life_left_is_ended_before_the_next(world):
    """Guard and sentinel killed in one instant, with a daemon of the server's own."""
    name, _, value = world.mark.partition("=")
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, name: value}, start_new_session=True)
    give_up_at = time.monotonic() + deadline_s()
    while not bearing(world.mark):  # the kernel shows no environment until an exec is quite through
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    await world.launch(sys.executable, "-S", "-c", "pass")
    await world.process.wait_swept()
    assert left.wait(deadline_s()) == -9


async def test_a_next_life_lets_the_guards_of_the_last_one_finish(world):
    """They were once ended as what the last life had left, before they had removed its files."""
    await world.launch()
    tree, first = await world.all_up(), world.process
    os.kill(first.pid, signal.SIGKILL)
    scratch, world.scratch = world.scratch, world.scratch.with_name("second")
    await world.launch(sys.executable, "-S", "-c", "pass")
    await first.wait_swept()
    await world.nothing_left(tree)
    assert not scratch.exists()


def test_a_command_that_is_not_there_is_an_error(world):
    with pytest.raises(ServerError, match=r"could not be started: /nowhere/python: No such file") as caught:
        asyncio.run(world.launch("/nowhere/python"))
    assert str(world.log) in caught.value.hint


def test_an_owner_that_is_gone_is_an_error(world):
    world.owner.kill()
    world.owner.wait()
    with pytest.raises(ServerError, match="belongs to a process that is gone"):
        asyncio.run(world.launch())


async def test_a_server_gets_its_signals_back_and_its_own_session(world):
    """The guard ignores SIGINT; a server that inherited that would not be stopped by its own children."""
    script = "import os, signal; print(signal.getsignal(signal.SIGINT), os.getsid(0) == os.getpid(), flush=True)"
    await world.launch(sys.executable, "-S", "-c", script)
    await world.process.wait_swept()
    assert world.log.read_text().split()[-1] == "True"
    assert "default_int_handler" in world.log.read_text()


# ── identity ──


def test_a_pid_that_was_reused_is_somebody_else():
    me = identify(os.getpid())
    stranger = Process(me.pid, me.started - 1)
    assert me == Process.parse(str(me)) == identify(os.getpid())
    assert not send(stranger, signal.SIGKILL)
    assert wait_ended([stranger], timeout_s=deadline_s())


def test_a_zombie_has_ended():
    with subprocess.Popen(["true"]) as child:
        process = identify(child.pid)
        if process is not None:
            assert wait_ended([process], deadline_s())
        assert identify(child.pid) is None


def test_a_process_whose_first_thread_has_ended_lives_on():
    """It looks like a zombie, and holds its port: SGLang's looked so for a moment after SIGKILL."""
    threads = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); print(flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", f"{threads}; ctypes.CDLL(None).pthread_exit(0)"], stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        while (Path("/proc") / str(child.pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        process = identify(child.pid)
        assert process is not None
        assert not wait_ended([process], timeout_s=0.01)
        assert send(process, signal.SIGKILL)
        assert wait_ended([process], deadline_s())


def test_waiting_ends_at_its_deadline():
    assert not wait_ended([identify(os.getpid())], timeout_s=0.01)
