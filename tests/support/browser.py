"""A headless Chromium, driven over its DevTools protocol: opens a page, evaluates in it, draws it, lists what it asked.

Of this machine's own Chromium; nothing is downloaded. The caller enters `Browser` and opens pages of any width.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

from launcher.base.errors import ResourceError

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S, ANSWER_S, LOOK_S = 120.0, 60.0, 0.05
ENDPOINT = re.compile(rb"DevTools listening on (ws://\S+)")


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with an empty profile. Raises ResourceError where there is none, or it doesn't start."""

    async def __aenter__(self) -> Self:
        chromium = find_chromium()
        if chromium is None:
            raise ResourceError("there is no Chromium on the PATH", "apt-get install chromium")
        self._profile = tempfile.mkdtemp(prefix="watch-browser-")
        self._said = (Path(self._profile) / "stderr").open("wb")
        flags = [
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
        ]
        flags += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses root a sandbox
        self._process = await asyncio.create_subprocess_exec(
            chromium,
            *flags,
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,
        )
        self._session = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(START_S):
                self._socket = await self._session.ws_connect(await self._endpoint(), max_msg_size=0)
        except TimeoutError as error:
            await self.__aexit__()
            raise ResourceError(
                f"{chromium} did not start within {START_S:g} s", "start it by hand and look"
            ) from error
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._said.close()
        shutil.rmtree(self._profile, ignore_errors=True)  # its helpers may still be writing there

    async def _endpoint(self) -> str:
        while self._process.returncode is None:
            if match := ENDPOINT.search(Path(self._said.name).read_bytes()):
                return match[1].decode()
            await asyncio.sleep(LOOK_S)
        raise ResourceError("Chromium ended at its start", "start it by hand and look")

    async def page(self, *, width: int) -> Page:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"])
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Network", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1.0,
            mobile=width < 600,
        )
        return page

    async def call(self, method: str, *, page: str = "", **parameters: object) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": page} if page else {})
        await self._socket.send_json(message)
        async with asyncio.timeout(ANSWER_S):
            said = await answer
        if "error" in said:
            raise ResourceError(f"{method}: {said['error']['message']}")
        return said["result"]

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if (answer := self._answers.pop(said.get("id"), None)) is not None:
                if not answer.done():  # else its caller has given up
                    answer.set_result(said)
            elif (page := self._pages.get(said.get("sessionId", ""))) is not None:
                page.take(said["method"], said["params"])


class Page:
    """`requests`: the URL of each that the page made. `complaints`: errors and what its policy refused."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._id = session
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def take(self, method: str, said: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(said["exceptionDetails"]))
            case "Log.entryAdded" if said["entry"]["level"] == "error":
                self.complaints.append(said["entry"]["text"])

    async def call(self, method: str, **parameters: object) -> Any:
        return await self._browser.call(method, page=self._id, **parameters)

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(ANSWER_S):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """Its value as JSON has it; a promise is waited for."""
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise ResourceError(f"the page: {said['exceptionDetails']}")
        return said["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The first value of `expression` that is true. Raises ResourceError."""
        give_up_at = time.monotonic() + ANSWER_S
        while not (value := await self.evaluate(expression)):
            if time.monotonic() > give_up_at:
                raise ResourceError(f"not so within {ANSWER_S:g} s: {expression}; {'; '.join(self.complaints)}")
            await asyncio.sleep(LOOK_S)
        return value
