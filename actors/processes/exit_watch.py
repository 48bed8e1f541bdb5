"""The end of a process of this machine, heard of in milliseconds and without asking it anything."""

from __future__ import annotations

import asyncio
import os


async def process_ended(pid: int) -> bool:
    """Until it has ended, also as a zombie. False at once where there is no such process here to wait for."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # gone already, or of another machine
        return False
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True
