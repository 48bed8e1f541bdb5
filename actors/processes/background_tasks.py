"""Tasks that go on beside their owner, and the errors that end them, told to who looks.

A task that only watches and has died of a defect would leave its Coordinator blind, and the run waiting for ever for
what it no longer sees. A run that ends with its reason is the lesser evil (P9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


def keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Begin `work`, and hold it in `tasks` until it has ended well."""

    def let_go(task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            tasks.discard(task)

    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(let_go)


def raise_defects(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Raises what ended one of `tasks`, if an error did."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
