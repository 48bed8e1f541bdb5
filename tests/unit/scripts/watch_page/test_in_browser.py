"""The page in a real browser, served and as a file: drawn, inert, zoomed, by keyboard, with no request to any other
host. Skipped where no Chromium is."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunLock, RunPaths
from scripts import report
from scripts.watch import link
from scripts.watch_page.server import WatchServer
from tests.support.browser import Browser, find_chromium
from tests.support.long_run import LongRun
from tests.support.report_parts import facts_of_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on the PATH"),
]
TOKEN = "a-token"
page_ends = []
"""What ends the server of the page that is looked at."""
OPENED = "document.documentElement?.dataset.opened"
ATTACK = "<img src='http://evil.test/x' onerror='window.owned=1'><script>window.owned=1</script>"


@pytest.fixture(scope="module")
def fileroot(tmp_path_factory):
    root = tmp_path_factory.mktemp("browsed")
    for trial, seed in (("t0", 1), ("t1", 2)):
        paths = RunPaths(fileroot=root, user="ann", experiment_name="long", trial_name=trial)
        LongRun(paths, steps=2000, incidents=12, attempts=2, seed=seed).write()
    return root


@contextlib.asynccontextmanager
async def browsed(fileroot, *, width=1280, token=TOKEN):
    """The page, opened; no other host is asked for anything."""
    page_ends.clear()
    runner = web.AppRunner(WatchServer(fileroot, TOKEN).application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        page_ends.append(runner.cleanup)
        port = runner.addresses[0][1]
        async with Browser() as browser:
            page = await browser.page(width=width)
            await page.open(link(port, token))
            yield page
        own = (f"http://127.0.0.1:{port}/", fileroot.as_uri(), "data:,")
        others = [url for url in page.requests if not url.startswith(own)]
        assert page.requests
        assert others == []
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("width", [390, 1280])
async def test_all_is_drawn_and_nothing_wider_than_the_screen(fileroot, width):
    async with browsed(fileroot, width=width) as page:
        await page.until(OPENED)
        await page.until("!!document.querySelector('.sample')")
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        titles = await page.evaluate("[...document.querySelectorAll('#curves h2')].map(one => one.textContent)")
        assert titles[0] == "Reward"
        assert {
            "KL of old and new policy in a step nats",
            "Entropy nats",
            "Gradient norm",
            "Learning rate",
        } <= {*titles}
        legend = await page.evaluate("document.querySelector('.lead .legend').textContent")
        assert [
            name
            for name in (
                "undone by a restore",
                "held-out, sampled",
                "held-out, greedy",
                "restored to here",
                "incident, over",
            )
            if name not in legend
        ] == []
        drawn = "[...document.querySelectorAll('#curves canvas')].map(one => one.getContext('2d')\
            .getImageData(0, 0, one.width, one.height).data.some(value => value))"
        assert await page.evaluate(drawn) == [True] * len(titles)
        tiles = await page.evaluate("[...document.querySelectorAll('.tile span')].map(one => one.textContent)")
        assert [words.split(":")[0] for words in tiles[:3]] == ["learning", "health", "lost"]
        assert tiles[0].endswith(" (2 prompts not scored)")
        assert await page.evaluate("document.querySelectorAll('#lanes .row').length") == 5
        states = await page.evaluate(
            "[...document.querySelectorAll('#lanes .legend > span')].map(one => one.textContent)"
        )
        assert "stands by" not in states
        assert "running, ready" in states
        flat = "valueSpan(0, 0, false)"
        assert await page.evaluate(flat) == [0, 1], "figures that are all 0 are not shown to a part in a billion"
        assert await page.evaluate("document.querySelector('.asks').hidden"), "nobody is there to be asked"
    assert page.complaints == []


async def test_a_zoom_shows_single_steps_and_a_click_shows_what_was_written_there(fileroot):
    async with browsed(fileroot) as page:
        await page.until(OPENED)
        assert "is the mean of 5 steps" in await page.evaluate("document.querySelector('#thinned').textContent")
        box = "document.querySelector('.lead .u-over').getBoundingClientRect()"
        left, top, wide = await page.evaluate(f"(box => [box.left, box.top, box.width])({box})")

        async def mouse(kind, share, **more):
            await page.call("Input.dispatchMouseEvent", type=kind, x=left + share * wide, y=top + 60, **more)

        await mouse("mouseMoved", 0.5)
        await mouse("mousePressed", 0.5, button="left", clickCount=1)
        await mouse("mouseMoved", 0.52, button="left", buttons=1)
        await mouse("mouseMoved", 0.55, button="left", buttons=1)
        await mouse("mouseReleased", 0.55, button="left", clickCount=1)
        await page.until("document.querySelector('#thinned').textContent === ''")
        assert "steps 1,0" in await page.evaluate("document.querySelector('#range').textContent")
        await mouse("mouseMoved", 0.6)
        await page.until("document.querySelectorAll('.readout')[1].textContent.startsWith('step 1,0')")
        await asyncio.sleep(0.5)  # a click right after a zoom is the end of its drag
        await mouse("mousePressed", 0.6, button="left", clickCount=1)
        await mouse("mouseReleased", 0.6, button="left", clickCount=1)
        await page.until("document.querySelector('#samples input').value")
        step = int(await page.evaluate("document.querySelector('#samples input').value"))
        await page.until(f"document.querySelector('#samples h3').textContent === 'Step {step:,}'")
        assert 1000 <= step <= 1100


@pytest.mark.parametrize("width", [390, 1280])
async def test_as_a_file_it_has_all_and_one_click_leads_from_an_incident_to_what_was_written_there(fileroot, width):
    report.main(["--fileroot", str(fileroot), "--user", "ann", "--experiment-name", "long", "--trial-name", "t0"])
    paths = RunPaths(fileroot=fileroot, user="ann", experiment_name="long", trial_name="t0")
    newest = facts_of_page(paths)["incidents"][-1]
    async with Browser() as browser:
        page = await browser.page(width=width)
        await page.open(paths.report.as_uri())
        await page.until(OPENED)
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert await page.evaluate("document.querySelector('.asks').hidden"), "a file asks no run for anything"
        await page.evaluate("document.querySelector('#incidents button').click()")
        titles = "[...document.querySelectorAll('#samples h3')].map(one => one.textContent)"
        wanted = [f"Step {newest['step']:,}", f"Step {newest['step'] - 1:,}, the one before"]
        await page.until(f"JSON.stringify({titles}) === {json.dumps(json.dumps(wanted, separators=(',', ':')))}")
        assert {*page.requests} - {"data:,"} == {paths.report.as_uri()}
        assert page.complaints == []


async def test_the_keyboard_moves_over_the_steps_and_chooses_one(fileroot):
    async with browsed(fileroot) as page:
        await page.until(OPENED)
        await page.evaluate("document.querySelector('.lead .plot').focus()")
        for key in ("End", "ArrowLeft", "Enter"):
            await page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        await page.until("document.querySelector('.lead .readout').textContent.startsWith('step 1,99')")
        step = int(await page.until("document.querySelector('#samples input').value"))
        assert 1990 <= step < 1999


async def test_what_was_held_out_after_the_last_step_is_drawn(tmp_path):
    """The axis ended with the last step, and the accuracy of the finished weights was cut off."""
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="short", trial_name="t0")
    LongRun(paths, steps=60, incidents=1).write()
    lines = paths.events.read_text().splitlines()
    last = {
        "event": "eval.done",
        "policy_version": 60,
        "prompts": 64,
        "sampled": 0.9,
        "greedy": 0.95,
        "global_step": 59,
    }
    lines.insert(-1, json.dumps(json.loads(lines[-1]) | last))
    paths.events.write_text("\n".join(lines) + "\n")
    async with browsed(tmp_path) as page:
        await page.until(OPENED)
        box = "document.querySelector('.lead .u-over').getBoundingClientRect()"
        left, top, wide = await page.evaluate(f"(box => [box.left, box.top, box.width])({box})")
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + wide - 3, y=top + 60)
        said = await page.until("document.querySelector('.lead .readout').textContent")
        assert said.startswith("step 60 ")
        assert "held-out, sampled 0.9" in said


async def test_runs_side_by_side_with_the_settings_that_differ(fileroot):
    async with browsed(fileroot) as page:
        await page.until(OPENED)
        await page.evaluate("document.querySelector('#picker input:not(:checked)').click()")
        await page.until("document.querySelectorAll('.card.run').length === 2")
        await page.until("document.querySelector('#settings').textContent.includes('1 of 3 settings differ')")
        assert "t1: reward" in await page.until("document.querySelector('.lead .legend').textContent")


async def test_what_a_model_a_log_or_a_name_says_is_never_run(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="<b>x", trial_name="t")
    LongRun(paths, steps=60, incidents=2).write()
    for file, keys in (
        (paths.events, ("reason", "doing", "subject")),
        (paths.samples, ("prompt", "completion", "server")),
    ):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        changed = [line | {key: ATTACK for key in keys if key in line} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in changed))
    lines = [json.loads(line) | {f"{ATTACK}": 1.0} for line in paths.metrics.read_text().splitlines()]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths.config.write_text(json.dumps({ATTACK: ATTACK}))
    async with browsed(tmp_path) as page:
        await page.until(OPENED)
        await page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        await page.until("document.querySelector('.sample pre')?.textContent.includes('onerror')")
        await page.until("document.querySelector('#settings td')?.textContent.includes('onerror')")
        await page.until("document.querySelector('#further').textContent.includes('onerror')")
        assert await page.evaluate("window.owned ?? null") is None
        assert await page.evaluate("document.querySelectorAll('img, b > b, main script').length") == 0
        report.main(["--fileroot", str(tmp_path), "--user", "ann"])
        await page.open(paths.report.as_uri())
        await page.until(OPENED)
        assert await page.evaluate("document.querySelector('#incidents').textContent.includes('onerror')")
        assert await page.evaluate("window.owned ?? null") is None
        assert await page.evaluate("document.querySelectorAll('img, b > b, main script').length") == 0


async def test_what_a_person_opened_stays_open_while_the_run_steps(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="long", trial_name="t")
    LongRun(paths, steps=60, incidents=2).write()
    lines = [line for line in paths.events.read_text().splitlines() if "run.finished" not in line]
    paths.events.write_text("\n".join(lines) + "\n")
    step = json.loads(paths.metrics.read_text().splitlines()[-1])
    with RunLock(paths):
        async with browsed(tmp_path) as page:
            await page.until(OPENED)
            await page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
            await page.evaluate("document.querySelector('#settings input').value = 'seed'")
            append_line(paths.metrics, step | {"global_step": 60, "time": step["time"] + 1})
            await page.until("document.querySelector('.tiles').textContent.includes('61 of 60')")
            assert await page.evaluate("document.querySelector('#settings input').value") == "seed"
            assert await page.evaluate("document.querySelectorAll('details:not([open])').length") == 0


async def test_a_wrong_token_is_one_message(fileroot):
    async with browsed(fileroot, token="other") as page:
        said = await page.until("document.querySelector('#notice').textContent")
    assert said == "the token is not this server's: open the link that it printed"


async def test_without_an_answer_nothing_is_claimed_of_now(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="long", trial_name="t")
    LongRun(paths, steps=60, incidents=2).write()
    lines = [line for line in paths.events.read_text().splitlines() if "run.finished" not in line]
    paths.events.write_text("\n".join(lines) + "\n")
    with RunLock(paths):
        async with browsed(tmp_path) as page:
            await page.until(OPENED)
            assert await page.evaluate("document.querySelector('.word').textContent") == "RUNNING"
            await page_ends[0]()
            await page.until("document.querySelector('.word').textContent === 'RUNNING WHEN LAST SEEN'")
            assert "does not answer" in await page.evaluate("document.querySelector('#notice').textContent")
            assert "live when last seen" in await page.evaluate("document.querySelector('.run').textContent")
