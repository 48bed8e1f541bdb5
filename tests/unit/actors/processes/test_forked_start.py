"""Servers forked of a template, with real process trees: whoever is killed, at whichever moment, nothing is left."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from dataclasses import replace

import pytest

from actors.processes import process_template
from actors.processes.exit_notifier import VARIABLE
from actors.processes.guarded_process import GuardedProcess, ProcessLaunch
from actors.processes.process_template import ProcessTemplate
from actors.processes.process_tree import PROC, bearing, descendants, identify, name, send, wait_ended
from launcher.base.errors import ServerError
from tests.unit.actors.processes.test_process_guard import TREE, VICTIMS, World, deadline_s, how_it_ends

ENTRY = (sys.executable, "-S", "-m", "tests.programs.forked_program")


class ForkedWorld(World):
    """The same tree, forked of a template."""

    template: ProcessTemplate | None = None
    variables: dict[str, str]

    def __init__(self, folder):
        super().__init__(folder)
        self.variables = {}

    async def begin(self, **variables: str) -> None:
        self.variables = variables
        launch = ProcessLaunch(
            command=ENTRY,
            environment={**os.environ, **variables},
            log=self.log,
            mark=self.mark,
            watch=[self.owner.pid],
            grace_s=0.0,
            scratch=self.scratch.with_name("of the template"),
        )
        self.template = await ProcessTemplate.launch(launch)

    async def start(self, launch: ProcessLaunch) -> GuardedProcess:
        if self.template is None:
            await self.begin()
        environment = {**launch.environment, **self.variables, "TMPDIR": str(self.scratch)}
        self.launched = replace(launch, environment=environment)
        await asyncio.wait_for(asyncio.shield(self.template.ready), deadline_s())
        assert self.template.why_not(self.launched) == ""
        return await self.template.fork(self.launched)

    async def launch(self, *words: str, **how) -> None:
        await super().launch(*ENTRY, *(words or ("tests.programs.fake_tree", str(self.file))), **how)

    async def gone(self) -> None:
        """All that bears the mark, whatever it is."""
        async with asyncio.timeout(deadline_s()):
            while bearing(self.mark):
                await asyncio.sleep(0.01)


@pytest.fixture
def world(tmp_path):
    world = ForkedWorld(tmp_path)
    yield world
    world.owner.kill()
    world.owner.wait()
    for process in [*bearing(world.mark), *(p for p in getattr(world, "guards", []) if p)]:
        send(process, signal.SIGKILL)


def print_(what: str, folder) -> str:
    """A module that prints it, as a command's words."""
    (folder / "prints.py").write_text(f"import os, signal, sys, tempfile\nprint({what}, flush=True)\n")
    return "prints"


@pytest.mark.parametrize("victim", VICTIMS)
async def test_whoever_is_killed_nothing_is_left(world, victim):
    await world.launch()
    tree = await world.all_up()
    os.kill(VICTIMS[victim](world), signal.SIGKILL)
    await world.nothing_left(tree)
    if victim != "owner":
        assert identify(world.template.pid) is not None
        await world.template.end()
    await world.gone()
    ended = world.process.ended
    assert (ended.exit_code, ended.cause) == how_it_ends(world, victim)
    assert list(world.scratch.parent.glob("*scratch*")) == []
    assert not world.scratch.with_name("of the template").exists()


async def test_a_server_outlives_its_template(world):
    await world.launch()
    tree = await world.all_up()
    await world.template.end()
    assert world.process.ended is None
    assert len(await world.all_up()) == TREE
    assert "gone" in world.template.why_not(world.launched)
    await world.process.end()
    await world.nothing_left(tree)


MOMENTS = {
    "launcher": "its guard ended at once",
    "before guards": "its guard ended at once",
    "sentinel": "was gone before it was started|-9",  # the guard may look before the sentinel has ended
    "guard": "its guard ended at once",
    "server": "-9",
    "let go": "-9",
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_death_within_a_start_leaves_nothing(world, moment):
    await world.begin(DIES_AT=moment)
    try:
        await world.launch()
    except ServerError as error:
        said = error.message
    else:
        await world.nothing_left([])
        said = str(world.process.ended.exit_code)
    assert re.search(MOMENTS[moment], said)
    assert identify(world.template.pid) is not None
    await world.template.end()
    await world.gone()
    assert not world.scratch.exists()
    assert not world.file.exists() or moment == "sentinel"  # whose end the guard may see when the server has begun


async def test_a_template_that_is_stopped_is_not_waited_for(world, monkeypatch):
    monkeypatch.setattr(process_template, "ANSWER_S", 0.2)
    await world.begin()
    await asyncio.wait_for(asyncio.shield(world.template.ready), deadline_s())
    os.kill(world.template.pid, signal.SIGSTOP)
    with pytest.raises(ServerError, match="did not start within"):
        await world.launch()
    await world.template.end()
    await world.gone()
    assert not world.scratch.exists()


@pytest.mark.parametrize("victim", ["owner", "guard", "sentinel", "socket"])
async def test_a_template_ends_with_whom_it_belongs_to(world, victim):
    await world.begin()
    await asyncio.wait_for(asyncio.shield(world.template.ready), deadline_s())
    process = world.template._process
    match victim:
        case "owner":
            world.owner.kill()
        case "guard":
            os.kill(process.guard_pid, signal.SIGKILL)
        case "sentinel":
            os.kill(process.sentinel_pid, signal.SIGKILL)
        case "socket":
            world.template._orders.close()
    await asyncio.wait_for(process.wait_swept(), deadline_s())
    await world.gone()


async def test_a_template_has_nothing_of_its_owners(world):
    """A pipe's end that it had would hide the end of what another writes to it."""
    readable, writable = os.pipe()
    await world.launch()
    tree = await world.all_up()
    ours = {files(os.getpid())[descriptor] for descriptor in (readable, writable)}
    held = {pid: files(pid) for pid in (world.template.pid, world.process.pid)}
    await world.process.end()
    await world.nothing_left(tree)
    await world.template.end()
    (ours, held) = ours, held
    template, server = held.values()
    assert not ours & set(template.values())
    assert sorted(template)[:3] == sorted(server) == [0, 1, 2]
    assert len(template) == 4
    assert template[1] == template[2] != server[1] == server[2]


def files(pid):
    found = {}
    for entry in (PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this very look
            found[int(entry.name)] = str(entry.readlink())
    return found


async def test_a_server_is_as_a_program_that_was_run(world, tmp_path):
    await world.begin(PYTHONPATH=str(tmp_path))
    what = (
        "signal.getsignal(2), signal.getsignal(1), os.getsid(0) == os.getpid(), tempfile.gettempdir(), "
        f"sys.argv[1:], os.environ['{VARIABLE}'], open('/proc/self/comm').read()"
    )
    await world.launch(print_(what, tmp_path), "--port", "1")
    await world.process.wait_swept()
    title = name(world.template.identity)
    await world.template.end()
    title = title
    said = world.log.read_text()
    assert "default_int_handler" in said
    assert f"default_int_handler> 0 True {world.scratch} ['--port', '1'] {world.scratch}/exit_locks {title}\n" in said
    assert world.process.ended.exit_code == 0


async def test_its_servers_are_forked_and_differ_by_chance(world, tmp_path):
    await world.begin(PYTHONPATH=str(tmp_path))
    for _ in range(2):
        await world.launch(print_("os.getpid(), __import__('random').random()", tmp_path))
        await world.process.wait_swept()
    await world.template.end()
    (one, first), (other, second) = (line.split() for line in world.log.read_text().splitlines())
    assert one != other
    assert first != second


async def test_what_an_earlier_life_left_is_ended_and_the_template_is_not(world):
    """Guard and sentinel killed in one instant: the daemons bear the mark by the template's own environment."""
    await world.launch()
    tree = await world.all_up()
    for pid in (world.process.sentinel_pid, world.process.guard_pid):
        os.kill(pid, signal.SIGKILL)
    await world.process.wait_swept()
    left = [process for process in tree if process in bearing(world.mark)]
    world.scratch = world.scratch.with_name("second")
    await world.launch()
    assert await asyncio.to_thread(wait_ended, left, deadline_s())
    for process in tree:  # the daemon without a mark, which the page of servers names
        send(process, signal.SIGKILL)
    await world.process.end()
    await world.template.end()
    await world.gone()


async def test_another_environment_is_named(world):
    await world.launch()
    for changes, named in (({"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS"), ({"TMPDIR": "/elsewhere"}, "")):
        environment = {**world.launched.environment, **changes}
        launch = replace(world.launched, environment=environment)
        assert world.template.why_not(launch) == (f"it was made with another {named}" if named else "")
    await world.process.end()
    await world.template.end()


async def test_a_template_with_threads_is_refused(world):
    await world.begin(THREAD="1")
    with pytest.raises(ServerError, match="it has 2 threads"):
        await asyncio.wait_for(asyncio.shield(world.template.ready), deadline_s())
    await asyncio.wait_for(world.template._process.wait_ended(), deadline_s())  # it says why before it ends
    await world.template.end()
    await world.gone()
    assert "2 threads, and can't be forked" in world.log.read_text()


async def test_the_guards_of_a_fork_are_light(world):
    """Memory, and so the kernel's choice whom to kill: they have nothing of the template's image."""
    await world.launch()
    tree = await world.all_up()
    words = [(PROC / str(pid) / "cmdline").read_bytes().split(b"\0") for pid in (world.process.guard_pid,)]
    heads = descendants(world.process.sentinel_pid)
    give_up_at = time.monotonic() + deadline_s()
    while name(identify(world.process.sentinel_pid)) != "server-sentinel":
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.01)
    await world.process.end()
    await world.nothing_left(tree)
    await world.template.end()
    ((words,), heads) = words, heads
    assert b"actors.processes.process_guard" in words
    assert identify(world.process.guard_pid) is None
    assert {process.pid for process in heads} >= {world.process.guard_pid, world.process.pid}
