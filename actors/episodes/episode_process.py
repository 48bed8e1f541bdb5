"""The trainer's side of a process that plays episodes: many at a time, each answered by a line.

    play ─► RewardProcess.send ─► the process (actors/reward/episode_functions.py) ─► a reading thread ─► play returns

Waits for: the process's lines. Unblocked by: a line, or the process's end, which fails all that it was playing.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from actors.reward.reward_process import ProcessGone, RewardProcess
from launcher.base.errors import RewardImportError
from launcher.config.schema import RunConfig

SEND_S = 30.0
READ_S = 3600.0


class EpisodeProcess:
    """Made on the thread of its asyncio loop, whose end ends the process."""

    def __init__(self, config: RunConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = RewardProcess(config.reward, episode=config.rollout.episode)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._orders: dict[int, dict[str, object]] = {}
        self._last_run: dict[str, object] | None = None
        self._forgetting: set[asyncio.Future[None]] = set()
        self._numbers = itertools.count(1)
        self._sending = asyncio.Lock()
        self.is_gone = self.is_killed = self._has_played = False
        self._reader = threading.Thread(target=self._read, name="episodes", daemon=True)
        self._reader.start()

    @property
    def playing(self) -> int:
        return len(self._answers)

    async def ready(self) -> None:
        """Until the user's code is imported. Raises RewardImportError and ProcessGone."""
        await asyncio.shield(self._ready)

    async def is_awake(self, within_s: float) -> bool:
        """Whether its loop answers: code that never awaits keeps all of its episodes waiting."""
        try:
            async with asyncio.timeout(within_s):
                await self.play({"ping": True})
        except (TimeoutError, ProcessGone):
            return False
        return True

    async def play(self, order: dict[str, object]) -> dict[str, Any]:
        """What the process says of an episode. Raises ProcessGone."""
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        self._orders[number] = order
        try:
            await self._send({"id": number, **order})
            said: dict[str, Any] = await answer
            self._has_played = True
            return said
        except asyncio.CancelledError:
            if not self.is_gone:
                forgetting = asyncio.ensure_future(self._forget(number))
                self._forgetting.add(forgetting)
                forgetting.add_done_callback(self._forgetting.discard)
            raise
        finally:
            del self._answers[number], self._orders[number]

    def was_running(self, order: Mapping[str, object]) -> bool | None:
        """Whether that episode's code was what the process ran when it ended or was killed. None: it ran none, or one
        that isn't known."""
        return None if self._last_run is None else self._last_run is order

    def grown_gb(self) -> float:
        """Since its first answer: what the user's code has loaded by then is no growth."""
        return self._process.grown_gb() if self._has_played else 0.0

    def kill(self) -> None:
        self._note_last_run()
        self.is_killed = True
        self._process.kill()

    def _note_last_run(self) -> None:
        if not (self.is_killed or self.is_gone):
            self._last_run = self._orders.get(self._process.running())

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self._reader.join)
        async with self._sending:  # what is still being sent needs the socket
            self._process.bury()

    async def _forget(self, number: int) -> None:
        try:
            await self._send({"cancel": number})
        except ProcessGone:
            self.kill()

    async def _send(self, message: dict[str, object]) -> None:
        """Whole, also where the episode is cancelled meanwhile: the next message must not begin within this one. Raises
        ProcessGone, also of a process that doesn't read, which is ended."""
        async with self._sending:
            if self.is_gone:
                raise ProcessGone("before it was sent the episode")
            sending = asyncio.ensure_future(asyncio.to_thread(self._process.send, message, time.monotonic() + SEND_S))
            try:
                await asyncio.shield(sending)
            except asyncio.CancelledError:
                while not sending.done():
                    with suppress(asyncio.CancelledError):  # it is raised below
                        await asyncio.wait({sending})
                if sending.exception() is not None:
                    self._process.kill()
                raise
            except TimeoutError:
                self._process.kill()
                raise ProcessGone(f"it read nothing for {SEND_S:g} s") from None
            except ProcessGone as error:
                self._end(error)  # the reader's thread may notice later: until then each retry would come here again
                raise

    def _read(self) -> None:
        try:
            self._process.wait_ready()
            self._loop.call_soon_threadsafe(self._begin)
            while True:
                try:
                    said = self._process.receive(time.monotonic() + READ_S)
                except TimeoutError:
                    continue
                self._loop.call_soon_threadsafe(self._take, said)
        except (ProcessGone, RewardImportError) as error:
            self._loop.call_soon_threadsafe(self._end, error)

    def _begin(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _take(self, said: dict[str, Any]) -> None:
        answer = self._answers.get(said["id"])
        if answer is not None and not answer.done():
            answer.set_result(said)

    def _end(self, error: Exception) -> None:
        self._note_last_run()
        self.is_gone = True
        unanswered: list[asyncio.Future[Any]] = [self._ready, *self._answers.values()]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may be waiting
