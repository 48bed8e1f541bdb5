"""Faults between a run and its servers (C8, X-load, X-busy): a proxy for each server that corrupts what passes.

The run is started with `sglang.host=127.0.0.2 +sglang.extra_args.hos=127.0.0.1`: it asks its servers at 127.0.0.2,
they listen at 127.0.0.1, and at 127.0.0.2 listens this, on the same port, for each incarnation of each server.
Everything passes unchanged unless `proxy.json` changes it. (`hos` is what SGLang's own parser takes for `--host`;
the launcher keeps the full name for itself, and has no setting for an address that differs from the one it asks.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Self

from actors.processes.process_tree import Process
from launcher.base.durable import make_folder, replace_file
from launcher.base.errors import UsageError
from launcher.base.file_lock import file_held
from launcher.run_files.run_paths import RunPaths
from scripts.faults.declaration import SO_LONG, FaultContext, Figures, Option, fault, seconds, setting
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.fault_proxy import FaultProxy, Spoil
from scripts.run_processes import LiveServer, RunProcesses, find_servers

RUN_ASKS, SERVER_LISTENS = "127.0.0.2", "127.0.0.1"
SETTINGS = f"sglang.host={RUN_ASKS} +sglang.extra_args.hos={SERVER_LISTENS}"
HOW_TO = f"start `python -m scripts.inject_fault --interpose …` and then the run, with {SETTINGS}"
LOOK_S = 0.2


async def interpose(paths: RunPaths, seed: int) -> None:
    """Follow the run's servers as they come and go. Raises UsageError where another interposer does already."""
    place = FaultPaths(paths)
    make_folder(place.root)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_held(place.proxy_lock))
        except BlockingIOError as error:
            raise UsageError("another interposer follows this run", "one is enough; end one of them") from error
        place.proxy.unlink(missing_ok=True)
        async with Interposer(paths, place, seed) as interposer:
            while True:
                await interposer.look()
                await asyncio.sleep(LOOK_S)


class Interposer:
    """One proxy for each live server, of the same port."""

    def __init__(self, paths: RunPaths, place: FaultPaths, seed: int) -> None:
        self._paths = paths
        self._place = place
        self._seed = seed
        self._spoil = Spoil()
        self._passing: dict[Process, FaultProxy] = {}
        self._counted: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for http in list(self._passing):
            await self._leave(http)

    async def look(self) -> None:
        """Begin and end proxies as servers do, read what to spoil, and write down what was."""
        self._spoil = read_spoil(self._place.proxy)
        servers = {server.http: server for server in find_servers(self._paths) if server.url}
        for http in self._passing.keys() - servers.keys():
            await self._leave(http)
        for http in servers.keys() - self._passing.keys():
            await self._enter(servers[http])
        counts = sum((proxy.fired for proxy in self._passing.values()), self._counted)
        if counts != self._told:
            replace_file(self._place.proxy_fired, json.dumps(counts).encode())
            self._told = counts

    async def _enter(self, server: LiveServer) -> None:
        port = int(server.url.rpartition(":")[2])
        seed = self._seed + server.index
        target = f"http://{SERVER_LISTENS}:{port}"  # its own arguments name both addresses
        proxy = FaultProxy(target, seed=seed, host=RUN_ASKS, port=port, spoil=lambda: self._spoil)
        self._passing[server.http] = await proxy.__aenter__()
        print(f"{server.name} (pid {server.http.pid}) is reached at {proxy.url}", file=sys.stderr, flush=True)

    async def _leave(self, http: Process) -> None:
        proxy = self._passing.pop(http)
        self._counted += proxy.fired
        await proxy.__aexit__()


def read_spoil(path: Path) -> Spoil:
    """What an injector has asked for; nothing once its time is over, so that one that was killed leaves nothing on."""
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return Spoil()
    return Spoil(**said["spoil"]) if time.monotonic() < said["until"] else Spoil()


@contextlib.contextmanager
def spoiling(place: FaultPaths, spoil: Spoil, seconds: float) -> Iterator[None]:
    """The interposer does that within the block, and at most for so long."""
    said = {"spoil": asdict(spoil), "until": time.monotonic() + seconds}
    replace_file(place.proxy, json.dumps(said).encode())
    try:
        yield
    finally:
        place.proxy.unlink(missing_ok=True)


def fired(place: FaultPaths) -> int:
    """How many requests were spoiled or delayed so far."""
    try:
        return sum(json.loads(place.proxy_fired.read_text()).values())
    except FileNotFoundError:
        return 0


def check_interposed(paths: RunPaths, found: RunProcesses) -> None:
    """Raises UsageError where no interposer is running, or the run doesn't go through it."""
    lock = FaultPaths(paths).proxy_lock
    if not lock.exists():
        raise UsageError("no proxy is between this run and its servers", HOW_TO)
    with contextlib.suppress(BlockingIOError), file_held(lock):
        raise UsageError("the interposer of this run has ended", HOW_TO)
    if (host := setting(paths, "sglang.host")) != RUN_ASKS:
        raise UsageError(f"this run calls its servers directly: sglang.host is {host}", HOW_TO)


# ── the faults ──


def _spoil_for_a_time(context: FaultContext, spoil: Spoil) -> Figures:
    check_interposed(context.paths, context.found)  # again: it may have ended since the command
    place = FaultPaths(context.paths)
    while_on = spoiling(place, spoil, context.within_s + context.number("seconds"))
    return {"target": "requests", "requests": context.count_hits("requests", lambda: fired(place), while_on)}


def _spoiled(code: str, what: str, spoil: Callable[[FaultContext], Spoil], **options: Option) -> None:
    declare = fault(
        code, what, role="server", noticed_as="server", needs="interposer", check=check_interposed, **options
    )
    declare(lambda context: _spoil_for_a_time(context, spoil(context)))


_spoiled(
    "C8",
    "request errors: a share of the generations is reset, refused, cut or emptied on the way",
    lambda context: Spoil(share=context.number("share")),
    share=Option(0.2, "of the requests", least=0.001),
    seconds=seconds(60.0, SO_LONG),
)
_spoiled(
    "X-load",
    "trap: loads of weights take longer",
    lambda context: Spoil(load_s=context.number("load_s")),
    load_s=seconds(5.0, "of each, more"),
    seconds=seconds(30.0, SO_LONG),
)
_spoiled(
    "X-busy",
    "trap: the server answers 503 to health while it generates",
    lambda context: Spoil(busy=True),
    seconds=seconds(30.0, SO_LONG),
)
