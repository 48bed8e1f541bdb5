"""What a process host's tests wait for."""

import asyncio
from pathlib import Path

from tests.programs.forked_program import LOOKS
from tests.support.machine import scaled


async def has_looked(log: Path) -> None:
    """Until the host with this log (tests/programs/forked_program.py) has looked at its tree since this was called."""
    looks = log.with_suffix(LOOKS)
    first = size(looks)
    async with asyncio.timeout(scaled(30.0)):
        while size(looks) < first + 2:  # one may have begun before
            await asyncio.sleep(0.01)


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
