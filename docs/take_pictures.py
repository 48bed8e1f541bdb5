"""Takes the pictures of the README and of these pages anew, from the pages of today's code, in this machine's Chromium:

    python -m scripts.storm --seed 1 --fileroot storm1
    python -m docs.take_pictures storm1/logs/$USER/arithmetic_cpu/trial0

storm.png is the storm's report; watch.png and watch_390.png are the live page of a made run of 10,000 steps.
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import tempfile
from pathlib import Path

from aiohttp import web
from PIL import Image

from launcher.run_files.run_paths import RunPaths
from scripts import report
from scripts.watch import link
from scripts.watch_page.server import WatchServer
from tests.support.browser import Browser, Page
from tests.support.long_run import LongRun

DOCS = Path(__file__).parent
SCALE = 2.0
COLOURS = 255
"""A palette makes a picture three times smaller; with one of 96, two curves got one colour."""
DRAWN = "document.documentElement?.dataset.opened"


async def take_picture(page: Page, path: Path, *, width: int, height: int) -> None:
    await page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=SCALE,
        mobile=width < 600,
    )
    await asyncio.sleep(2.0)  # the charts are drawn anew for another width
    taken = await page.call("Page.captureScreenshot", format="png")
    picture = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, picture.size, path.stat().st_size)


async def bottom_of(page: Page, element: str) -> int:
    """In pixels from the top of the page, with the page's own gap below it."""
    return int(await page.evaluate(f"Math.ceil({element}.getBoundingClientRect().bottom + scrollY + 12)"))


async def picture_report(browser: Browser, written: Path) -> None:
    page = await browser.page(width=1280)
    await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    await page.open(written.resolve().as_uri())
    await page.until(DRAWN)
    height = await bottom_of(page, "document.querySelector('.lead')")
    await take_picture(page, DOCS / "storm.png", width=1280, height=height)


async def picture_live_page(browser: Browser, fileroot: Path) -> None:
    runner = web.AppRunner(WatchServer(fileroot, "token").application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        for name, width, last in (("watch.png", 1280, 2), ("watch_390.png", 390, 0)):
            page = await browser.page(width=width)
            await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
            await page.open(link(runner.addresses[0][1], "token"))
            await page.until(DRAWN)
            height = await bottom_of(page, f"document.querySelectorAll('#curves > *')[{last}]")
            await take_picture(page, DOCS / name, width=width, height=height)
    finally:
        await runner.cleanup()


async def take_all(storm_logs: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        paths = RunPaths(fileroot=Path(made), user="ann", experiment_name="long", trial_name="run")
        LongRun(paths, steps=10_000, incidents=50, attempts=3).write()
        async with Browser() as browser:
            await picture_report(browser, storm_logs / "report.html")
            await picture_live_page(browser, Path(made))


if __name__ == "__main__":
    if report.main(sys.argv[1:]) == 0:
        asyncio.run(take_all(Path(sys.argv[1])))
