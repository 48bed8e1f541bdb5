"""What a fault is brought about with: what lives of the run now, the fault's options, and what they choose of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from actors.processes.process_tree import Process, identify
from launcher.base.errors import StorageError
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from scripts.faults.find import RunProcesses, Server
from scripts.faults.kinds import ANY, PARTS, Value
from scripts.faults.signals import Missed

Figures = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a fault is brought about with. `ready` are the indices of the servers that are READY."""

    paths: RunPaths
    found: RunProcesses
    options: Mapping[str, Value]
    ready: Sequence[int]
    draw: random.Random
    within_s: float
    sleep: Callable[[float], None] = time.sleep

    @property
    def keys(self) -> ServerKeys:
        """What the run's servers ask for. Raises Missed."""
        try:
            return ServerKeys.read(self.paths.keys)
        except StorageError as error:
            raise Missed(error.message, error.hint) from error

    def number(self, option: str) -> float:
        return float(self.options[option])

    def word(self, option: str) -> str:
        return str(self.options[option])

    def server(self) -> Server:
        """The one that is asked for, or a READY one drawn. Raises Missed."""
        wanted = int(self.number("server")) if "server" in self.options else -1
        candidates = [server for server in self.found.servers if server.index in self.ready]
        if wanted >= 0:
            candidates = [server for server in candidates if server.index == wanted]
        if not candidates:
            raise Missed(f"server {'of any index' if wanted < 0 else wanted} is not READY", f"READY: {self.ready}")
        return self.draw.choice(candidates)

    def trainer(self) -> Process:
        if self.found.trainer is None:
            raise Missed("the trainer has no process now", "wait until it has been restarted")
        return self.found.trainer

    def some_part(self, server: Server) -> tuple[str, tuple[Process, ...]]:
        """The part of a server that is asked for, or one drawn of those that it has. Raises Missed."""
        wanted = self.word("part")
        there = {part: processes for part in PARTS if (processes := server.part(part))}
        if wanted == ANY:
            wanted = self.draw.choice(sorted(there))
        if wanted not in there:
            raise Missed(f"{server.name} has no process {wanted!r}", f"it has {', '.join(there)}")
        return wanted, there[wanted]

    def scheduler(self, server: Server) -> tuple[Process, ...]:
        """What makes the tokens: the scheduler, or where a server has none of that name, all of it."""
        return server.part("scheduler") or server.tree


def lives(process: Process) -> bool:
    return identify(process.pid) == process
