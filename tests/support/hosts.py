"""What a process host's tests wait for."""

import asyncio
from pathlib import Path

from actors.processes.process_host import LOOK_S, TICK_MS
from tests.support.machine import scaled

LOOKS = 3 * int(LOOK_S * 1000 / TICK_MS)
"""Times that a host goes to sleep: between the first and the last of them it looks at its tree as it is now."""


async def has_looked(host_pid: int) -> None:
    """Until a host has looked at the files of its tree since this was called."""
    first = sleeps(host_pid)
    async with asyncio.timeout(scaled(30.0)):
        while sleeps(host_pid) < first + LOOKS:
            await asyncio.sleep(0.01)


def sleeps(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
