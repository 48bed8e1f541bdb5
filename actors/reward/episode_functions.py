"""Plays episodes with the user's function, in a process that is theirs: many at a time, on one asyncio loop.

    async def solve(record, client) -> float | dict          client: openai.AsyncOpenAI, to the trainer's door
    async def run(data, base_url, api_key, http_client)      for agents with a client of their own (AReaL's form)

A function gets what its signature names. A class is made once, without arguments, and its `run` is called.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any

from actors.reward.reward_functions import failure_of, parts_of
from actors.reward.reward_import import check_signature, import_named
from launcher.base.errors import RewardImportError

KEY = "rollout.episode"
ARGUMENTS = ("record", "client", "data", "answer", "prompt_id", "base_url", "api_key", "http_client")

Say = Callable[[Mapping[str, object]], None]
Note = Callable[[int], None]
"""Told whose code begins to run, and 0 when it waits: so it is known who ended the process, or blocks it."""


class _Lent:
    """httpx's transport, which stays open where the client that has it is closed."""

    def __init__(self, transport: Any) -> None:
        self.handle_async_request = transport.handle_async_request

    async def __aenter__(self) -> _Lent:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def aclose(self) -> None:
        pass


class EpisodeFunction:
    """What `rollout.episode` names. Raises RewardImportError."""

    def __init__(self, path: str) -> None:
        named = import_named(path, KEY)
        self._fn: Any = getattr(_made(path, named), "run", None) if inspect.isclass(named) else named
        check_signature(path, self._fn, KEY, ARGUMENTS)
        if not inspect.iscoroutinefunction(self._fn):
            raise RewardImportError(
                f"{KEY}={path!r} is not async",
                "write `async def`, and `await asyncio.to_thread(…)` for what blocks",
            )
        parameters = inspect.signature(self._fn).parameters.values()
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
        self._arguments = [name for name in ARGUMENTS if takes_all or name in {one.name for one in parameters}]
        self._name = path.partition(":")[2]
        self._transport: Any = None
        self._openai: Any = None
        if "client" in self._arguments:
            try:
                import openai
            except ImportError as error:
                hint = "install it, or take base_url and api_key in place of client"
                raise RewardImportError(
                    f"{KEY}={path!r} takes a client, and there is no package openai", hint
                ) from error
            self._openai = openai

    async def play(self, order: Mapping[str, Any], note: Note) -> dict[str, object]:
        """The message for one episode. Never raises for what the function does, but where it is cancelled."""
        try:
            parts = parts_of(self._name, await noted(self._fn(**self._given(order)), order["id"], note))
            total = math.fsum(parts.values())
            return {"value": total} | ({"parts": parts} if list(parts) != [""] else {})
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a function raises is that episode's alone
            return failure_of(error)

    def _given(self, order: Mapping[str, Any]) -> dict[str, object]:
        known = {**order, "data": dict(order["record"]), "http_client": self._http_client()}
        if self._openai is not None:
            known["client"] = self._openai.AsyncOpenAI(
                base_url=order["base_url"],
                api_key=order["api_key"],
                http_client=known["http_client"],
                max_retries=0,  # the door has tried already
                timeout=None,  # a server's repair takes as long as it takes
            )
        return {name: known[name] for name in self._arguments}

    def _http_client(self) -> object:
        """One of the episode's own, which it may close, on the connections of all: reading the certificates again would
        take longer than a turn."""
        if not {"client", "http_client"} & set(self._arguments):
            return None
        import httpx

        if self._transport is None:
            self._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        lent: Any = _Lent(self._transport)
        return httpx.AsyncClient(transport=lent, trust_env=False, timeout=None)


def _made(path: str, cls: Callable[[], object]) -> object:
    try:
        return cls()
    except Exception as error:  # the user's own class
        what = f"{KEY}={path!r} can't be made without arguments: {type(error).__name__}: {error}"
        raise RewardImportError(what, "it must be a function, or a class with an async method run") from error


@types.coroutine
def noted(inner: Coroutine[Any, Any, Any], number: int, note: Note) -> Generator[Any, Any, Any]:
    """What `inner` returns; each of its stretches without waiting is noted."""
    sent, resume = None, inner.send
    while True:
        note(number)
        try:
            waits_for = resume(sent)
        except StopIteration as end:
            return end.value
        finally:
            note(0)
        try:
            sent, resume = (yield waits_for), inner.send
        except BaseException as error:  # noqa: BLE001 - it is for the function
            sent, resume = error, inner.throw


def serve(function: EpisodeFunction, receive: Callable[[], dict[str, Any]], say: Say, note: Note) -> None:
    """Play what `receive` brings until it raises EOFError."""
    asyncio.run(_serve(function, receive, say, note))


async def _serve(function: EpisodeFunction, receive: Callable[[], dict[str, Any]], say: Say, note: Note) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    tasks: dict[int, asyncio.Task[None]] = {}

    async def play(order: dict[str, Any]) -> None:
        number = order["id"]
        try:
            said = await function.play(order, note)
        except asyncio.CancelledError as error:
            if number not in tasks or ended.is_set():
                raise
            said = failure_of(error)  # by itself
        finally:
            tasks.pop(number, None)
        say({"id": number, **said})

    def take_order(order: dict[str, Any]) -> None:
        if "cancel" in order:
            if order["cancel"] in tasks:
                tasks.pop(order["cancel"]).cancel()
        elif "ping" in order:
            say({"id": order["id"]})
        else:
            tasks[order["id"]] = loop.create_task(play(order))

    def read() -> None:
        while True:
            try:
                order = receive()
            except EOFError:
                loop.call_soon_threadsafe(ended.set)
                return
            except Exception:  # noqa: BLE001 - the next order can't be found on the line, and whoever asks would wait for ever
                traceback.print_exc()
                os._exit(1)
            loop.call_soon_threadsafe(take_order, order)

    threading.Thread(target=read, name="orders", daemon=True).start()
    await ended.wait()
