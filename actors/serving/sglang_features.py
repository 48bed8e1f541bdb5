"""How versions of SGLang that both are supported differ, read from the source of the installed one.

0.5.17 and 0.5.23 were run. Nothing is imported; servers have the environment of whoever asks here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from launcher.base.errors import RequestFailed

ROUTES = "srt/entrypoints/http_server.py"
STREAMER = "srt/managers/scheduler_components/output_streamer.py"
SESSION = '"/begin_weight_update"'
BY_LENGTH = "% stream_interval == 0"


def sglang_folder() -> Path:
    """Raises ModuleNotFoundError where there is none."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("sglang is not installed", name="sglang")
    return Path(found.origin).parent


@cache
def updates_in_sessions() -> bool:
    """Tensors are taken between /begin_weight_update and /end_weight_update only (0.5.23)."""
    return SESSION in (sglang_folder() / ROUTES).read_text()


@cache
def streams_by_length() -> bool:
    """A part is sent whenever a completion's length modulo the interval is 1, or 0 where the interval is not above 1
    (0.5.17): a positive one would send each first token by itself. Else when as many tokens are unsent (0.5.23)."""
    return BY_LENGTH in (sglang_folder() / STREAMER).read_text()


@asynccontextmanager
async def update_session(post: Callable[[str], Awaitable[object]]) -> AsyncIterator[None]:
    """Where SGLang wants one; `post` asks a path of it. One that is open already, of a trainer that was killed, lets
    no other begin: it is ended first."""
    if not updates_in_sessions():
        yield
        return
    try:
        await post("/begin_weight_update")
    except RequestFailed as failure:
        if failure.kind != "http_4xx":
            raise
        await post("/end_weight_update")
        await post("/begin_weight_update")
    yield
    await post("/end_weight_update")
