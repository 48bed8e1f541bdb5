"""How long the watch page takes to open, in a headless Chromium: from its request until every curve is drawn.

Each time a server that has read nothing yet, and a browser with an empty profile: files, facts, transfer and drawing
are all in the figure; the starts of the two processes are not. `--picture` keeps the last page as a PNG.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from launcher.base.errors import UsageError
from scripts.benchmark.measured import Measured
from scripts.checkpoints.arguments import DEFAULT_FILEROOT
from scripts.watch_page.browser import Browser
from scripts.watch_page.run_list import runs_below

OPENED = "Number(document.documentElement?.dataset.opened ?? 0)"
COMPLETE = "!!document.querySelector('#samples .list > *') && !!document.querySelector('#settings > div > *')"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fileroot", type=Path, default=DEFAULT_FILEROOT, help="of the runs; see tests.support.long_run"
    )
    parser.add_argument("--times", type=int, default=5, help="how often (default: 5)")
    parser.add_argument("--width", type=int, default=1280, help="of the screen, in pixels (default: 1280)")
    parser.add_argument("--height", type=int, default=20_000, help="most of the page that is in the picture")
    parser.add_argument("--picture", type=Path, help="draw the page into this PNG")


def run(given: argparse.Namespace) -> Measured:
    """Processor time of the server: its start included."""
    if not runs_below(given.fileroot):
        raise UsageError(
            f"there is no run below {given.fileroot}", "`python -m tests.support.long_run FOLDER` makes one"
        )
    found = [asyncio.run(_opened(given)) for _ in range(given.times)]
    return Measured(points={name: [one[name] for one in found] for name in found[0]})


async def _opened(given: argparse.Namespace) -> dict[str, float]:
    async with _server(given.fileroot) as (server, link), Browser() as browser:
        page = await browser.page(width=given.width)
        await page.open(link)
        milliseconds = await page.until(OPENED)
        used = psutil.Process(server).cpu_times()
        if given.picture is not None:
            await page.until(COMPLETE)
            given.picture.write_bytes(await page.picture(most_height=given.height))
        here = link.partition("#")[0]
        others = [url for url in page.requests if not url.startswith((here, "data:"))]
        cpu_s = used.user + used.system
        return {
            "opened_s": milliseconds / 1000,
            "server_cpu_s": cpu_s,
            "requests": len(page.requests),
            "other_hosts": len(others),
        }


@asynccontextmanager
async def _server(fileroot: Path) -> AsyncIterator[tuple[int, str]]:
    """Its process and its link."""
    command = [sys.executable, "-m", "scripts.watch", "--with-driver", "--fileroot", str(fileroot)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.pid, (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()  # it ends
        await process.wait()
