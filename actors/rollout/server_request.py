"""A request that one server after another is asked, and its turn at one of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from launcher.base.errors import RequestFailed
from launcher.base.messages import ServerInfo, ServerKey


class RequestMoved(Exception):
    """The server leaves, is gone or is silent before it has answered: ask another one. Does not count as an attempt."""


class ServerRequest(ABC):
    """What is asked of one server after another, until it is over."""

    prompt = ""
    """The prompt's id: the server that had it before may have its prefix."""
    avoid = ""
    """The server that has just failed at it, or fell silent."""
    continues = True
    """Its tokens are heard as they are made, and the next server continues from the last one. Else waiting for it shows
    no silence of its server, and a silence does not move it: it would begin anew."""
    silences = 0
    """How often it was moved for a silence."""
    is_unheard = False
    """It was moved for a silence, and no token has come since. It stays until one has: else two silent servers would
    hand it to each other, and begin anew each time."""

    @property
    def samples(self) -> int:
        """That are missing."""
        return 1

    @abstractmethod
    async def send(self, server: ServerInfo, heard: Callable[[], None]) -> None:
        """Ask for what is missing, and keep what arrives, also where this is cancelled. `heard`: to be called whenever
        tokens arrive. Raises RequestFailed."""

    @abstractmethod
    def is_over(self) -> bool:
        """Asked after each server, whatever came of it."""

    async def failed(self, failure: RequestFailed) -> None:
        """Returns where it is to be asked again."""
        raise failure


class ServerTurn:
    """A request at a server, or waiting for one: until then `server` is None. It is moved by a deadline, in the task
    that asks: a task for each turn would cost as much as the rest of it."""

    def __init__(self, request: ServerRequest) -> None:
        self.request = request
        self.server: ServerInfo | None = None
        self.limit = asyncio.timeout(None)

    @property
    def key(self) -> ServerKey | None:
        """The incarnation of its server."""
        return None if self.server is None else self.server.key

    def move(self, within_s: float = 0.0) -> None:
        """End it then, unless it ends earlier."""
        at = asyncio.get_running_loop().time() + within_s
        if not self.limit.expired() and ((before := self.limit.when()) is None or at < before):
            self.limit.reschedule(at)

    def stay(self) -> None:
        """It is not moved any more, unless it has been."""
        if not self.limit.expired():
            self.limit.reschedule(None)
