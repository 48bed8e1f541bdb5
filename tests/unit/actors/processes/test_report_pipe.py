"""A guard's reports are read to their end, and the pipe's descriptor is closed once: its number may be another file by
then."""

import asyncio
import os

import pytest

from actors.processes.guarded_process import ReportPipe


async def another_pipe():
    """Whose end is read: the loop has polled, and run what was due after it, several times."""
    readable, writable = os.pipe()
    pipe = ReportPipe(readable)
    for line in (b"one\n", b"two\n", b"three\n"):
        os.write(writable, line)
        assert await pipe.lines.readline() == line
    os.close(writable)
    assert await pipe.lines.readline() == b""


@pytest.mark.parametrize("name", ["asyncio", "uvloop"])
def test_the_descriptor_is_closed_once_on_either_loop(name, monkeypatch):
    readable, writable = os.pipe()
    closed, close = [], os.close

    def note(descriptor):
        closed.append(descriptor)
        close(descriptor)

    async def work():
        pipe = ReportPipe(readable)
        os.write(writable, b"one\ntwo")
        assert await pipe.lines.readline() == b"one\n"
        monkeypatch.setattr(os, "close", note)
        close(writable)
        assert await pipe.lines.readline() == b"two"
        assert await pipe.lines.readline() == b""
        again = os.open(os.devnull, os.O_RDONLY)
        assert again == readable, "the number is free"
        pipe.close()
        await another_pipe()  # the loop has closed by then what it was to close
        os.fstat(again)
        close(again)

    made = asyncio.new_event_loop if name == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=made) as runner:
        runner.run(work())
    assert closed.count(readable) == 1
