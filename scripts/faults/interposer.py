"""Stands between a run and its servers, for the faults on the way (C8, X-load, X-busy).

The run is started with `sglang.host=127.0.0.2 +sglang.extra_args.hos=127.0.0.1`: it asks its servers at 127.0.0.2,
they listen at 127.0.0.1, and at 127.0.0.2 listens this, on the same port, for each life of each server. Everything
passes unchanged unless `proxy.json` says otherwise. (`hos` is what SGLang's own parser takes for `--host`; the launcher
keeps the full name for itself, and has no setting for an address that differs from the one it asks.)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Self

import yaml

from actors.processes.process_tree import Process
from launcher.base.durable import make_folder, replace_file
from launcher.base.errors import UsageError
from launcher.run_files.run_paths import RunPaths
from scripts.faults.fault_proxy import FaultProxy, Spoil
from scripts.faults.find import Server, find_servers
from scripts.faults.place import FaultPlace

RUN_ASKS, SERVER_LISTENS = "127.0.0.2", "127.0.0.1"
SETTINGS = f"sglang.host={RUN_ASKS} +sglang.extra_args.hos={SERVER_LISTENS}"
LOOK_S = 0.2


async def interpose(paths: RunPaths, seed: int) -> None:
    """Follow the lives of the run's servers until cancelled. Raises UsageError where another one does already."""
    place = FaultPlace.of(paths)
    make_folder(place.root)
    with _alone(place.proxy_lock):
        place.proxy.unlink(missing_ok=True)
        async with Interposer(paths, place, seed) as interposer:
            while True:
                await interposer.look()
                await asyncio.sleep(LOOK_S)


class Interposer:
    """One proxy for each living server, of the same port."""

    def __init__(self, paths: RunPaths, place: FaultPlace, seed: int) -> None:
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

    async def _enter(self, server: Server) -> None:
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
def spoiling(place: FaultPlace, spoil: Spoil, seconds: float) -> Iterator[None]:
    """The interposer does that within the block, and at most for so long."""
    said = {"spoil": asdict(spoil), "until": time.monotonic() + seconds}
    replace_file(place.proxy, json.dumps(said).encode())
    try:
        yield
    finally:
        place.proxy.unlink(missing_ok=True)


def fired(place: FaultPlace) -> int:
    """How many requests were spoiled or delayed so far."""
    try:
        return sum(json.loads(place.proxy_fired.read_text()).values())
    except FileNotFoundError:
        return 0


def check_interposed(paths: RunPaths) -> None:
    """Raises UsageError where no interposer lives, or the run doesn't go through it."""
    how_to = f"start `python -m scripts.inject_fault --interpose …` and then the run, with {SETTINGS}"
    try:
        fd = os.open(FaultPlace.of(paths).proxy_lock, os.O_RDWR)
    except FileNotFoundError as error:
        raise UsageError("nothing stands between this run and its servers", how_to) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # it lives
    else:
        raise UsageError("the interposer of this run has ended", how_to)
    finally:
        os.close(fd)
    try:
        host = yaml.safe_load(paths.config.read_text())["sglang"]["host"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UsageError(f"{paths.config} can't be read: {error}", "it is written when the run starts") from error
    if host != RUN_ASKS:
        raise UsageError(f"this run asks its servers directly: sglang.host is {host}", how_to)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UsageError("another interposer follows this run", "one is enough; end one of them") from error
    finally:
        os.close(fd)
