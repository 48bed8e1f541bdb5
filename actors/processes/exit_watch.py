"""Waits for the end of a process of this machine: through a pidfd, which reports it within milliseconds."""

from __future__ import annotations

import asyncio
import os

from actors.processes.process_tree import identify

LOOK_S = 0.1
"""Between two reads of /proc, where no pidfd is available."""


async def process_ended(pid: int) -> bool:
    """Returns True when the process has ended, as a zombie too; False at once where there is no such process here."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # no descriptor is free, or the kernel has no pidfd: that shows nothing about the process
        return await _ended_by_looks(pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True


async def _ended_by_looks(pid: int) -> bool:
    process = None
    while True:
        try:
            found = identify(pid)
        except OSError:  # nor can /proc be opened: still nothing is known
            found = process
        else:
            if found is None or (process is not None and found != process):
                return process is not None
        process = found
        await asyncio.sleep(LOOK_S)
