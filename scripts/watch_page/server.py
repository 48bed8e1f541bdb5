"""Answers the page, over HTTP on loopback. Whatever tells of a run needs the token; the page itself tells nothing.

    GET  /                     the page, the same as report.html, without facts
    GET  /facts                one run: what is new `since` the page last asked
    GET  /runs                 the runs below the fileroot
    GET  /samples              the completions of a step and of the one before
    POST /ask                  pause, resume, stop, one server more

The token is in the fragment of the link, which a browser sends to nobody; the page sends it in a header, which no page
of another origin can. A name that an attacker lets mean 127.0.0.1 is refused by the Host header.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from launcher.base.errors import LauncherError, UsageError
from launcher.html_report.page import policy, render_page, to_json
from launcher.reporting.figures import Window
from launcher.reporting.samples import samples_around
from launcher.run_files.run_paths import RunPaths
from scripts.run_control import send, serving
from scripts.run_processes import is_live
from scripts.watch_page.run_list import list_runs, run_of
from scripts.watch_page.watched_run import SeenOnPage, WatchedRun

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS = {
    "Content-Security-Policy": f"{policy(is_served=True)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ASKS = ("pause", "resume", "stop", "add_server")
MOST_RUNS = 8
LONGEST_BODY = 64 * 1024
LONGEST_REASON = 200

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WatchServer:
    """The application for the runs of one fileroot. Files are read in threads; a run's own are read once."""

    def __init__(self, fileroot: Path, token: str) -> None:
        self._fileroot = fileroot
        self._token = token
        self._watched: dict[str, WatchedRun] = {}

    def application(self) -> web.Application:
        made = web.Application(middlewares=[self._guarded], client_max_size=LONGEST_BODY)
        made.router.add_get("/", _page)
        made.router.add_get("/facts", self._facts)
        made.router.add_get("/runs", self._runs)
        made.router.add_get("/samples", self._samples)
        made.router.add_post("/ask", self._ask)
        return made

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check(request)
            answer = await handler(request)
        except web.HTTPException as refused:
            answer = _said({"error": refused.text or refused.reason}, status=refused.status)
        except LauncherError as error:
            answer = _said({"error": error.message, "hint": error.hint}, status=400)
        answer.headers.update(HEADERS)
        return answer

    def _check(self, request: web.Request) -> None:
        """Raises HTTPForbidden, HTTPUnauthorized."""
        if _host_name(f"//{request.headers.get('Host', '')}") not in LOOPBACK_NAMES:
            raise web.HTTPForbidden(text="this page is served to 127.0.0.1 and localhost only")
        if request.method == "POST" and request.headers.get("Origin") != f"http://{request.headers['Host']}":
            raise web.HTTPForbidden(text="a request from another page is not taken")
        if request.path != "/":
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()):
                raise web.HTTPUnauthorized(text="the token is not this server's: open the link that it printed")

    async def _runs(self, request: web.Request) -> web.Response:
        return _said({"runs": await asyncio.to_thread(list_runs, self._fileroot)})

    async def _facts(self, request: web.Request) -> web.Response:
        asked = request.query
        paths = await self._named(asked.get("run", ""))
        watched = self._watched.pop(asked["run"], None) or WatchedRun(paths)
        self._watched[asked["run"]] = watched  # the last one now
        if len(self._watched) > MOST_RUNS:
            del self._watched[next(iter(self._watched))]
        seen = SeenOnPage(
            generation=asked.get("generation", ""),
            facts=_number(asked, "facts"),
            since=_number(asked, "since"),
            width=_number(asked, "width", least=1),
            window=Window(first=_number(asked, "first"), last=_number(asked, "last")),
        )
        return _said(await asyncio.to_thread(watched.answer, seen))

    async def _samples(self, request: web.Request) -> web.Response:
        paths, step = await self._named(request.query.get("run", "")), _number(request.query, "step")
        return _said({"samples": await asyncio.to_thread(samples_around, paths, step)})

    async def _ask(self, request: web.Request) -> web.Response:
        try:
            said = orjson.loads(await request.read())
            run, what, reason = str(said["run"]), str(said["what"]), str(said.get("reason", ""))[:LONGEST_REASON]
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UsageError("the request is no JSON with run and what", "use the page's buttons") from error
        if what not in ASKS:
            raise UsageError(f"{what!r} can't be asked", f"one of {', '.join(ASKS)}")
        asked = await asyncio.to_thread(_ask_run, await self._named(run), what, reason)
        return _said({"asked": asked})

    async def _named(self, name: str) -> RunPaths:
        """It looks at the folders of all runs: a slow file system must not keep the loop from answering others."""
        return await asyncio.to_thread(run_of, self._fileroot, name)


def _ask_run(paths: RunPaths, what: str, reason: str) -> str:
    if is_live(paths) is False:
        raise UsageError(f"{paths.title} is not running", "python -m scripts.resume_training resumes a run")
    reason = reason or "from the watch page"
    if what == "add_server":
        entry = send(paths, "scale", reason=reason, servers=len(serving(paths, any_state=True)) + 1)
    else:
        entry = send(paths, what, reason=reason)
    return entry.description


async def _page(request: web.Request) -> web.StreamResponse:
    return web.Response(body=render_page(None), content_type="text/html", charset="utf-8")


def _said(content: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=to_json(content), status=status, content_type="application/json")


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _number(asked: Any, key: str, *, least: int = 0) -> int | None:
    """Raises UsageError for what is no integer from `least`."""
    text = asked.get(key)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number < 2**53:
        raise UsageError(f"{key}={text[:40]!r} is no integer from {least}", "the page asks with integers")
    return number
