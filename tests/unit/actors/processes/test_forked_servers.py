"""Servers that a host forks: at whichever moment one dies nothing is left, and each is as a program that was run."""

import asyncio
import contextlib
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from actors.processes import hosted_process
from actors.processes.process_tree import PROC, bearing
from launcher.base.errors import ServerError
from tests.support.worlds.processes import deadline_s, forked, until

__all__ = ["forked"]

MOMENTS = {
    "import": "its host ended",
    "order": "its host ended",
    "fork": "its host ended",
    "server": "-9",
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_death_within_a_start_leaves_nothing(forked, moment):
    await forked.begin(DIES_AT=moment)
    try:
        await forked.launch()
    except ServerError as error:
        said = error.message
    else:
        await forked.nothing_left([])
        said = str(forked.process.ended.exit_code)
    assert re.search(MOMENTS[moment], said)
    await forked.gone()
    assert not forked.scratch.exists()
    assert not forked.file.exists()


async def test_a_host_that_imports_ends_with_its_actor(forked):
    """Imports take 10 s, on a busy machine a minute; nobody reads the socket meanwhile."""
    await forked.begin(IMPORTS="/nowhere")
    await until(lambda: forked.log.exists() and "imports" in forked.log.read_text())
    assert not forked.host.ready.done()
    forked.host._hearing.cancel()  # closes the socket, as the end of the actor does
    await until(lambda: not bearing(forked.mark))


async def test_a_host_that_was_killed_is_not_waited_for(forked):
    """Nor is a child left that was forked while its parent was being killed."""
    await forked.launch()
    os.kill(forked.host.pid, signal.SIGKILL)
    with pytest.raises(ServerError, match="its host is gone"):
        await asyncio.wait_for(forked.host.start(forked.made()), hosted_process.ANSWER_S)
    await forked.gone()
    assert not forked.scratch.exists()


async def test_a_stopped_host_is_woken_by_an_order(forked):
    await forked.launch()
    tree = await forked.all_up()
    os.kill(forked.host.pid, signal.SIGSTOP)
    assert await asyncio.wait_for(forked.process.end(), deadline_s()) == []
    await forked.nothing_left(tree)
    await forked.gone()


async def test_a_server_has_nothing_of_its_host(forked):
    """A pipe's end that it had would hide the end of what another writes to it."""
    readable, writable = os.pipe()
    await forked.launch()
    tree = await forked.all_up()
    ours = {files(os.getpid())[descriptor] for descriptor in (readable, writable)}
    host, server = files(forked.host.pid), files(forked.process.pid)
    await forked.process.end()
    await forked.nothing_left(tree)
    await forked.gone()
    assert not ours & set(host.values())
    assert sorted(server) == [0, 1, 2]
    assert host[1] == host[2] != server[1] == server[2]


def files(pid):
    found = {}
    for entry in (PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this very look
            found[int(entry.name)] = str(entry.readlink())
    return found


async def test_a_host_keeps_no_descriptor_of_a_server_that_has_ended(forked):
    counts = []
    for _ in range(3):
        await forked.launch("tests.programs.fake_tree", str(forked.file), vital="grand")
        await forked.all_up()
        await forked.process.end()
        counts.append(len(files(forked.host.pid)))
    await forked.gone()
    assert counts[0] == counts[1] == counts[2]


def print_(what: str, folder) -> str:
    """A module that prints it, as a command's words."""
    (folder / "prints.py").write_text(f"import os, signal, sys, tempfile\nprint({what}, flush=True)\n")
    return "prints"


async def test_a_server_is_as_a_program_that_was_run(forked, tmp_path):
    await forked.begin(PYTHONPATH=str(tmp_path))
    what = (
        "signal.getsignal(2), signal.getsignal(1), os.getsid(0) == os.getpid(), tempfile.gettempdir(), "
        "sys.argv[1:], open('/proc/self/comm').read()"
    )
    await forked.launch(print_(what, tmp_path), "--port", "1")
    await forked.process.wait_swept()
    await forked.gone()
    said = forked.log.read_text()
    assert f"default_int_handler> 0 True {forked.scratch} ['--port', '1'] python" in said
    assert forked.process.ended.exit_code == 0


async def test_a_server_can_be_given_a_title(forked, tmp_path, monkeypatch):
    """SGLang's parts are known by theirs. setproctitle finds its place below the first variable, and found none where
    the environment had been set anew, or its first variable was TMPDIR, of which each server has its own: a scheduler
    that died was not seen as a vital part."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    setproctitle = pytest.importorskip("setproctitle")
    packages = str(Path(setproctitle.__file__).parents[1])
    await forked.begin(PYTHONPATH=os.pathsep.join((str(tmp_path), packages)))
    titled = "__import__('setproctitle').setproctitle('sglang::one') or open('/proc/self/comm').read()"
    await forked.launch(print_(titled, tmp_path))
    await forked.process.wait_swept()
    await forked.gone()
    assert forked.log.read_text().startswith("sglang::one\n")


async def test_its_servers_are_forked_and_differ_by_chance(forked, tmp_path):
    await forked.begin(PYTHONPATH=str(tmp_path))
    for _ in range(2):
        await forked.launch(print_("os.getpid(), __import__('random').random()", tmp_path))
        await forked.process.wait_swept()
    await forked.gone()
    (one, first), (other, second) = (line.split() for line in forked.log.read_text().splitlines())
    assert one != other
    assert first != second


async def test_another_environment_is_named(forked):
    await forked.begin()
    for changes, named in (({"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS"), ({"TMPDIR": "/elsewhere"}, "")):
        launch = replace(forked.made(), environment={**forked.made().environment, **changes})
        assert forked.host.why_no_fork(launch) == (f"it was made with another {named}" if named else "")
    await forked.gone()


async def test_a_host_with_threads_does_not_fork(forked):
    await forked.begin(THREAD="1")
    with pytest.raises(ServerError, match="its host has 2 threads, and can't be forked"):
        await forked.launch()
    await forked.gone()
