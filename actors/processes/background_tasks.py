"""Background tasks whose exceptions are re-raised to the owner.

A task that only watches and has died of a defect would leave its owner blind, and the run waiting for ever for what it
no longer sees. A run that ends with its reason is the lesser evil (P9).

No asyncio.TaskGroup: it would cancel what its owner is doing, such as a restore, in place of being asked at its next
look; and an owner that is closed alone, as a server's handle, would need a task that holds its group open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """The tasks of one owner, all on one loop. The owner calls `check` whenever it is asked something, and `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work`; it is kept until it has ended well."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def check(self) -> None:
        """Raises what ended one of the tasks, if an error did."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)


class BackgroundCall:
    """One call at a time in the background, at most every so many seconds."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._asked_at: float | None = None

    def start_if_due(self, ask: Callable[[], Coroutine[Any, Any, None]], now: float, interval_s: float) -> None:
        busy = self._task is not None and not self._task.done()
        if busy or (self._asked_at is not None and now - self._asked_at < interval_s):
            return
        self._asked_at = now
        self._task = asyncio.create_task(ask())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
