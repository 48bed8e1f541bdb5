"""The host with real process trees: whoever is killed, nothing is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from actors.processes import process_tree
from actors.processes.process_host import HOST
from actors.processes.process_tree import Process, bearing, descendants, identify, send, wait_ended
from launcher.base.errors import ServerError
from tests.support.hosts import has_looked
from tests.support.worlds.processes import TREE, World, deadline_s, end, until
from tests.support.worlds.processes import world as world


@pytest.fixture
def run(tmp_path):
    """Whose head is run as a program."""
    world = World(tmp_path)
    yield world
    end(world)


VICTIMS = {
    "owner": lambda world: world.owner.pid,
    "host": lambda world: world.process.host_pid,
    "server": lambda world: world.process.pid,
}


def how_it_ends(world: World, victim: str) -> tuple[int | None, str]:
    """Exit code and cause of the server, when the victim was killed."""
    return {
        "owner": (-9, f"the process that it belongs to (pid {world.owner.pid}) is gone"),
        "host": (None, f"its host (pid {world.process.host_pid}) was killed"),
        "server": (-9, ""),
    }[victim]


async def test_a_command_that_ends_at_once_was_started_and_has_its_exit_code(run):
    for _ in range(5):
        await run.launch("false")
        assert (await run.process.wait_ended()).exit_code == 1
        await run.nothing_left([])


@pytest.mark.parametrize("victim", VICTIMS)
async def test_whoever_is_killed_nothing_is_left(world, victim):
    """But a daemon with neither its parent nor its environment, where the host itself is killed: nobody could tell
    whose it is."""
    await world.launch()
    tree = await world.all_up()
    await has_looked(world.log)
    bare = [process for process in tree if process not in bearing(world.mark)]
    os.kill(VICTIMS[victim](world), signal.SIGKILL)
    await world.nothing_left([process for process in tree if process not in bare or victim != "host"])
    await world.gone()
    for process in bare:
        assert send(process, signal.SIGKILL) is (victim == "host")
    ended = world.process.ended
    assert (ended.exit_code, ended.cause) == how_it_ends(world, victim)
    assert not world.scratch.exists()
    assert not world.file.exists()


async def test_a_server_dies_with_its_host_although_nothing_shows_its_mark(run):
    """SGLang's processes overwrite their environment with their titles."""
    bare = "import os; os.execve('/bin/sleep', ['sleep', '1000'], {})"
    await run.launch(sys.executable, "-S", "-c", bare)
    server = identify(run.process.pid)
    await until(lambda: process_tree.name(server) == "sleep")
    assert server not in bearing(run.mark)
    os.kill(run.process.host_pid, signal.SIGKILL)
    await run.nothing_left([])
    assert await asyncio.to_thread(wait_ended, [server], deadline_s())


@pytest.mark.parametrize("number", [signal.SIGTERM, None], ids=["SIGTERM", "no socket"])
async def test_a_host_that_is_asked_to_end_leaves_nothing(world, number):
    await world.launch()
    tree = await world.all_up()
    if number is None:
        await world.host.end()
    else:
        os.kill(world.process.host_pid, number)
    await world.nothing_left(tree)
    assert world.process.ended.cause == "told to stop"
    await world.gone()


@pytest.mark.slow
@pytest.mark.parametrize("forks", ["run", "forked"])
def test_a_stopped_host_is_no_way_out(tmp_path, forks):
    """SIGSTOP on the host, then its actor dies: the kernel wakes the host as the socket ends."""
    mark = f"HOST_TEST={tmp_path}"
    with elsewhere(tmp_path, tmp_path / "ours_file", forks) as actor:
        assert actor.stdout.readline() == "up\n"
        (host,) = [process for process in bearing(mark) if process_tree.name(process) == HOST]
        tree = descendants(host.pid)
        assert len(tree) == TREE
        send(host, signal.SIGSTOP)
        actor.kill()
        assert wait_ended([host, *tree], deadline_s())


@contextlib.contextmanager
def elsewhere(folder, file, forks="run", before=()):
    """An actor with a tree in its host (tests/programs/hosted_elsewhere.py)."""
    words = [*before, sys.executable, "-m", "tests.programs.hosted_elsewhere", str(folder), str(file), forks]
    with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as actor:
        try:
            yield actor
        finally:
            actor.kill()


async def test_a_late_order_to_stop_one_leaves_the_next_alone(world):
    await world.launch()
    first = world.process
    await first.end()
    world.scratch = world.scratch.with_name("second")
    await world.launch()
    world.host.send({"stop": first.pid})
    await world.all_up()
    await has_looked(world.log)
    assert world.process.ended is None
    assert len(await world.all_up()) == TREE
    await world.process.end()


async def test_ending_ends_the_whole_tree_and_can_be_repeated(world):
    await world.launch()
    tree = await world.all_up()
    assert await world.process.end() == []
    await world.nothing_left(tree)
    assert await world.process.end() == []
    assert world.process.ended.cause == "told to stop"


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_within_its_grace_a_server_ends_in_its_own_way(run, is_stopped):
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up'); time.sleep(1000)"
    await run.launch(sys.executable, "-S", "-u", "-c", script, grace_s=deadline_s() / 4)
    async with asyncio.timeout(deadline_s()):
        while not run.log.exists() or "up" not in run.log.read_text():
            await asyncio.sleep(0.01)
    if is_stopped:
        os.kill(run.process.pid, signal.SIGSTOP)
    await run.process.end()
    assert run.process.ended.exit_code == 5


async def test_a_servers_own_end_is_told_with_its_exit_code(run):
    for script, code in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)):
        await run.launch(sys.executable, "-S", "-c", script)
        before = time.monotonic()
        ended = await run.process.wait_ended()
        await run.nothing_left([])
        assert (ended.exit_code, ended.cause) == (code, "")
        assert before - deadline_s() < ended.monotonic <= time.monotonic()


async def test_signals_to_the_servers_parent_are_not_meant_for_the_host(run):
    """SGLang's scheduler sends its parent SIGQUIT when it fails: the host, once the server has ended."""
    for number in ("SIGQUIT", "SIGINT", "SIGHUP", "SIGUSR1"):
        script = f"import os, signal; os.kill(os.getppid(), signal.{number}); raise SystemExit(3)"
        await run.launch(sys.executable, "-S", "-c", script)
        await run.nothing_left([])
        assert run.process.ended.exit_code == 3, number
        assert not run.host.is_gone(), number


async def vital_child(run, script):
    await run.launch(sys.executable, "-S", "-c", script, vital="vital::")
    async with asyncio.timeout(deadline_s()):
        while not (found := [p for p in descendants(run.process.pid) if process_tree.name(p) == "vital::one"]):
            await asyncio.sleep(0.01)
    await run.is_watched(found[0])
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "child"])
async def test_the_death_of_a_vital_child_ends_the_server(run, victim):
    """SGLang's main process lingers for seconds after its scheduler's death."""
    child = await vital_child(run, VITAL_CHILD)
    os.kill(run.process.pid if victim == "server" else child.pid, signal.SIGKILL)
    ended = await run.process.wait_ended()
    await run.nothing_left([child])
    cause = "" if victim == "server" else f"its vital::one (pid {child.pid}) is gone"
    assert (ended.exit_code, ended.cause) == (-9, cause)


@pytest.mark.slow
async def test_a_process_that_dies_is_told_where_a_pidfd_would_not_yet(run):
    """A process whose first thread has ended is still there, and its pidfd silent: what tells of it is its state."""
    child = await vital_child(run, CHILD_THAT_LINGERS)
    watch = process_tree.DeathWatch(child)
    assert not watch.is_dying()
    send(child, signal.SIGUSR1)
    async with asyncio.timeout(deadline_s()):
        ended = await run.process.wait_ended()
    await run.nothing_left([child])
    assert watch.is_dying(), "gone, whoever has its pid now"
    watch.close()
    assert ended.cause == f"its vital::one (pid {child.pid}) is gone"


VITAL_CHILD = """
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"vital::one", 0, 0, 0)
time.sleep(1000)
"""
CHILD_THAT_LINGERS = """
import ctypes, os, signal, threading, time
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).pthread_exit(0))
    ctypes.CDLL(None).prctl(15, b"vital::one", 0, 0, 0)
time.sleep(1000)
"""


async def test_a_memory_limit_is_the_kernels_own(run):
    script = "print(len(bytearray(10**6)), flush=True); bytearray(2**29)"
    await run.launch(sys.executable, "-S", "-c", script, memory_limit=2**28)
    await run.nothing_left([])
    said = run.log.read_text()
    assert said.startswith("1000000\n")
    assert said.endswith("MemoryError\n")


async def test_files_of_the_tree_are_removed_and_those_of_others_are_not(world):
    """Who made the other's file, and whether it is open, can't be seen in a container that shares its folder alone."""
    earlier, others = world.file.with_name("held before"), world.file.with_name("held by another")
    earlier.touch()
    await world.launch()
    tree = await world.all_up()
    others.touch()
    await has_looked(world.log)
    (world.scratch / "left").write_text("behind")
    os.kill(world.process.pid, signal.SIGKILL)
    await world.nothing_left(tree)
    assert not world.file.exists()
    assert not world.scratch.exists()
    assert earlier.exists()
    assert others.exists()


MAKES_A_FILE = """
import pathlib, sys, time
made, asked = map(pathlib.Path, sys.argv[1:])
while not asked.exists():
    time.sleep(0.005)
with made.open("w"):
    time.sleep(1000)
"""


async def test_a_file_that_was_made_a_moment_before_the_owner_is_killed_is_removed(run):
    """The host looks once a second: shared memory that was made since its last look stayed for good."""
    run.look_s = 1.0  # so that the file and the kill come between two looks
    late, asked = run.file.with_name("held late"), run.file.with_name("asked")
    await run.launch(sys.executable, "-S", "-c", MAKES_A_FILE, str(late), str(asked))
    await has_looked(run.log)
    asked.touch()
    await until(late.exists)
    os.kill(run.owner.pid, signal.SIGKILL)
    await run.nothing_left([])
    assert not late.exists()


async def test_a_file_of_the_tree_that_another_process_holds_open_stays(world):
    await world.launch()
    tree = await world.all_up()
    with world.file.open():
        await has_looked(world.log)
        os.kill(world.process.pid, signal.SIGKILL)
        await world.nothing_left(tree)
    assert world.file.exists()


@pytest.mark.slow
def test_files_of_a_living_server_of_another_pid_namespace_stay(tmp_path):
    """In /dev/shm, which both see, while neither sees the other's processes."""
    prefix = f"host_test_{os.getpid()}_"
    others, ours = (Path("/dev/shm") / f"{prefix}{whose}" for whose in ("others", "ours"))
    space = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with elsewhere(tmp_path, ours, before=space) as actor:
        try:
            if actor.stdout.readline() != "up\n":
                said = actor.stderr.read()
                if "unshare" in said:
                    pytest.skip(f"a PID namespace needs root: {said}")
                pytest.fail(said)
            with others.open("w"):
                assert actor.communicate("\n", timeout=deadline_s()) == ("", "")
                assert actor.returncode == 0
                assert others.exists()
                assert not ours.exists()
        finally:
            for file in (others, ours):
                file.unlink(missing_ok=True)


async def test_what_an_earlier_life_left_is_ended_before_the_next(run):
    """Its host and its actor were killed in one instant, with a daemon of the server's own."""
    name, _, value = run.mark.partition("=")
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, name: value}, start_new_session=True)
    give_up_at = time.monotonic() + deadline_s()
    while not bearing(run.mark):  # the kernel shows no environment until an exec is quite through
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    await run.launch(sys.executable, "-S", "-c", "pass")
    await run.process.wait_swept()
    assert left.wait(deadline_s()) == -9


async def test_a_next_host_lets_the_last_one_finish(world):
    """It was once ended as what the last life had left, before it had removed the files."""
    await world.launch()
    tree, first = await world.all_up(), world.process
    await has_looked(world.log)
    (world.scratch / "left").write_text("behind")
    world.host.close()
    scratch = world.scratch
    world.scratch = world.scratch.with_name("second")
    world.host = None
    await world.launch()
    await first.wait_swept()
    assert [process for process in tree if identify(process.pid) == process] == []
    assert first.ended.cause == "told to stop", "it was not killed"
    assert not scratch.exists()
    await world.process.end()
    await world.gone()


def test_a_command_that_is_not_there_is_an_error(run):
    with pytest.raises(ServerError, match=r"could not be started: /nowhere/python: No such file") as caught:
        asyncio.run(run.launch("/nowhere/python"))
    assert str(run.log) in caught.value.hint


def test_an_owner_that_is_gone_is_an_error(run):
    run.owner.kill()
    run.owner.wait()
    with pytest.raises(ServerError, match="belongs to a process that is gone"):
        asyncio.run(run.launch())


async def test_a_server_gets_its_signals_back_and_its_own_session(run):
    """The host ignores SIGINT; a server that inherited that would not be stopped by its own children."""
    script = "import os, signal; print(signal.getsignal(signal.SIGINT), os.getsid(0) == os.getpid(), flush=True)"
    await run.launch(sys.executable, "-S", "-c", script)
    await run.process.wait_swept()
    assert run.log.read_text().split()[-1] == "True"
    assert "default_int_handler" in run.log.read_text()


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
