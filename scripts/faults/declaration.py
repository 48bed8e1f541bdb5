"""How a kind of fault is declared: its options, what it needs, and the function that brings it about."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from actors.processes.process_tree import Process, identify
from launcher.base.errors import StorageError, UsageError
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of
from scripts.faults.signals import Missed
from scripts.run_processes import LiveServer, RunProcesses

Value = str | float
Figures = dict[str, object]
HIT_LOOK_S = 0.05
ANY = "any"
PARTS = ("scheduler", "http", "detokenizer", "tree")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a kind: a choice among `choices`, or where there are none a number of at least `least`."""

    default: Value
    meaning: str
    choices: tuple[str, ...] = ()
    least: float = 0.0

    def read(self, name: str, text: str) -> Value:
        """Raises UsageError naming the option."""
        if self.choices:
            if text not in self.choices:
                raise UsageError(f"{name}={text} is none of {', '.join(self.choices)}", f"set {name} to one of these")
            return text
        try:
            number = float(text)
        except ValueError as error:
            raise UsageError(f"{name}={text} is not a number", f"write e.g. {name}={self.default}") from error
        if not self.least <= number < float("inf"):
            raise UsageError(f"{name}={text} is less than {self.least:g}, or endless", f"write {name}={self.default}")
        return number


def seconds(default: float, meaning: str, least: float = 0.1) -> Option:
    return Option(default, meaning, least=least)


SERVER = Option(-1.0, "index of the server; -1: drawn by the seed", least=-1)
PART = Option(ANY, "which of the server's processes; any: drawn by the seed", (*PARTS, ANY))
SO_LONG = "for so long"
UNTIL_REPLACED = seconds(0.0, "then it resumes; 0: stopped until it is replaced", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultContext:
    """What a fault is injected with: the run's processes, the fault's options and what they choose of them.

    `ready`: indices of the READY servers.
    """

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

    def server(self) -> LiveServer:
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

    def part(self, server: LiveServer) -> tuple[str, tuple[Process, ...]]:
        """The part of a server that is asked for, or one drawn of those that it has. Raises Missed."""
        wanted = self.word("part")
        there = {part: processes for part in PARTS if (processes := server.part(part))}
        if wanted == ANY:
            wanted = self.draw.choice(sorted(there))
        if wanted not in there:
            raise Missed(f"{server.name} has no process {wanted!r}", f"it has {', '.join(there)}")
        return wanted, there[wanted]

    def count_hits(self, what: str, fired: Callable[[], int], while_on: AbstractContextManager[None]) -> int:
        """Keep a fault on for `seconds` from its first hit on, since for most of a step nobody asks a server or scores
        anything; how often it hit. Raises Missed where it never did."""
        before, deadline = fired(), time.monotonic() + self.within_s
        with while_on:
            while fired() == before and time.monotonic() < deadline:
                self.sleep(HIT_LOOK_S)
            if fired() > before:
                self.sleep(self.number("seconds"))
        if not (times := fired() - before):
            raise Missed(f"no {what} met the fault while it was on", "give it longer with --within")
        return times


Inject = Callable[[FaultContext], Figures]
Check = Callable[[RunPaths, RunProcesses], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault. `role` (server, trainer, supervisor, run) must not be recovering when it comes.

    `noticed_as`: by whose events it is noticed (`outcome.NOTICED`), where not by those of its role.
    `inject` injects it, checks that it fired and returns figures for the record; it raises Missed where it could
    not. What it changes for a time is changed back when it ends, however it ends. `check` raises UsageError where this
    run was not started in the way that the kind needs. `out_of_reach`: why a kind can't be injected at all.
    """

    id: str
    what: str
    role: str = "run"
    noticed_as: str = ""
    needs: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    inject: Inject | None = None
    check: Check = lambda paths, found: None
    out_of_reach: str = ""


KINDS: dict[str, FaultKind] = {}
"""Filled by the modules that declare them: import it from `kinds`."""


def fault(
    code: str,
    what: str,
    *,
    role: str = "run",
    noticed_as: str = "",
    needs: str = "",
    check: Check | None = None,
    **options: Option,
) -> Callable[[Inject], Inject]:
    """Declares the function below as what brings about the fault `code`. Raises ValueError where another one is."""

    def declare(inject: Inject) -> Inject:
        if code in KINDS:
            raise ValueError(f"fault {code} is declared twice: give one of them a code that is free")
        kind = FaultKind(
            id=code, what=what, role=role, noticed_as=noticed_as, needs=needs, options=options, inject=inject
        )
        KINDS[code] = kind if check is None else replace(kind, check=check)
        return inject

    return declare


def setting(paths: RunPaths, key: str) -> object:
    """What the run was started with. Raises UsageError."""
    value = setting_of(read_settings(paths.config), key)
    if value is None:
        raise UsageError(f"{paths.config} can't be read, or has no {key}", "it is written when the run starts")
    return value


def is_alive(process: Process) -> bool:
    return identify(process.pid) == process
