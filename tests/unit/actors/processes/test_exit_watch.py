"""A process counts as ended only when the kernel says so, not when it can't be watched."""

import asyncio
import errno
import os
import subprocess
from functools import partial

import pytest

from actors.processes import exit_watch
from actors.processes.exit_watch import process_ended
from tests.support.machine import scaled

deadline_s = partial(scaled, 30.0)


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [None, errno.EMFILE, errno.ENOSYS])
async def test_a_process_that_runs_has_not_ended_whatever_keeps_it_from_being_watched(child, monkeypatch, number):
    if number is not None:

        def fails(pid):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(exit_watch.os, "pidfd_open", fails)
    watching = asyncio.create_task(process_ended(child.pid))
    done, _ = await asyncio.wait([watching], timeout=0.3)
    assert not done
    child.kill()
    assert await asyncio.wait_for(watching, deadline_s())


def test_there_is_nothing_to_wait_for_where_there_is_no_such_process(child):
    child.kill()
    child.wait()
    assert not asyncio.run(process_ended(child.pid))
