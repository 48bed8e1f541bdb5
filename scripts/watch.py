"""Serves a page that shows the runs of a fileroot while they live: `python -m scripts.watch --help`.

It reads the runs' files alone, in a process of its own: nothing of a run waits for it, and its end ends nothing. It
listens on loopback; who has the link that it prints may see the runs and ask them to pause, resume or stop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from launcher.base.errors import ResourceError, UsageError
from launcher.run_files.run_keys import read_watch_token
from scripts.checkpoints.arguments import DEFAULT_FILEROOT, Parser
from scripts.ending import DONE, ended
from scripts.watch_page.run_list import written_runs
from scripts.watch_page.server import WatchServer

HOST = "127.0.0.1"
PORT_FREE_S = 10.0
"""For the page of the same run's driver before, which ends when it sees that driver gone."""
NICENESS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _watch(parser().parse_args(arguments)))


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "watch",
        "Serve a page that shows the runs of a fileroot while they live, on this machine's loopback.",
        "0 ended by Ctrl-C, or with its driver; 2 the command is wrong, or the port is taken",
    )
    made.add_argument(
        "--fileroot",
        type=Path,
        default=DEFAULT_FILEROOT,
        metavar="FOLDER",
        help="cluster.fileroot of the runs (default: %(default)s)",
    )
    made.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on; 0: a free one (default: 0)")
    made.add_argument(
        "--run", default="", metavar="USER/EXPERIMENT/TRIAL", help="run to show first; without it, the newest"
    )
    made.add_argument(
        "--keys", type=Path, metavar="FOLDER", help="a run's folder of keys, whose token is used; else a new token"
    )
    made.add_argument(
        "--with-driver", action="store_true", help="end when standard input ends (watch.port starts it so)"
    )
    return made


def _watch(given: argparse.Namespace) -> int:
    fileroot = given.fileroot.expanduser().absolute()
    if not 0 <= given.port <= 65535:
        raise UsageError(f"--port {given.port} is no port", "give one from 1 to 65535, or 0 for a free one")
    if not given.with_driver:
        _check_there(fileroot, given.fileroot)
    token = secrets.token_urlsafe(32) if given.keys is None else read_watch_token(given.keys)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    asyncio.run(_serve(given, WatchServer(fileroot, token).application(), token))
    return DONE


def _check_there(fileroot: Path, typed: Path) -> None:
    if not (fileroot / "logs").is_dir():
        raise UsageError(
            f"--fileroot {typed}: {fileroot / 'logs'} is not there", "give the cluster.fileroot of the runs"
        )
    if not written_runs(fileroot):
        raise UsageError(
            f"--fileroot {typed}: no run below {fileroot / 'logs'} has written anything", "start one first"
        )


async def _serve(given: argparse.Namespace, application: web.Application, token: str) -> None:
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        port = await _listen(runner, given.port, patience_s=PORT_FREE_S if given.with_driver else 0.0)
        print(link(port, token, given.run), flush=True)
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, over.set)
        if given.with_driver:
            threading.Thread(target=_until_input_ends, args=(loop, over), daemon=True).start()
        await over.wait()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, port: int, *, patience_s: float) -> int:
    """The port that it listens on. Raises ResourceError."""
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            await web.TCPSite(runner, HOST, port, reuse_address=True).start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < give_up_at:
                await asyncio.sleep(0.2)
                continue
            why = "is taken" if error.errno == errno.EADDRINUSE else f"can't be used: {error.strerror or error}"
            raise ResourceError(f"port {port} of {HOST} {why}", "give another --port (of a run: watch.port)") from error
        return int(runner.addresses[0][1])


def link(port: int, token: str, run: str = "") -> str:
    """The token is in the fragment, which a browser sends nowhere."""
    return f"http://{HOST}:{port}/#token={token}" + (f"&run={quote(run, safe='/')}" if run else "")


def _until_input_ends(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    loop.call_soon_threadsafe(over.set)


if __name__ == "__main__":
    sys.exit(main())
