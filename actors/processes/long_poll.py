"""How an actor answers a question that is held until there is something new to say."""

from __future__ import annotations

import asyncio
import contextlib


async def hold_answer(changed: asyncio.Event, hold_s: float) -> None:
    """Returns when something has changed since the last held answer, at once where another asks, else after `hold_s`
    seconds. 0: who asks now is not held, and whoever is held is answered too."""
    if not hold_s:
        changed.set()
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(hold_s):
            await changed.wait()
    changed.clear()
