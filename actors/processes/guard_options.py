"""The command line of a guard and of its sentinel (process_guard.py). Standard library only, for `python -S`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.processes.process_tree import Process

MODULE = "actors.processes.process_guard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """What a guard takes over that was forked with its server, and became the guard by exec (forked_start.py).

    `output`: the pipe that the server prints to; `gate`: the socket at which it waits to be let go.
    """

    sentinel: Process
    server: int
    output: int
    gate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The guard's command line. `watch`: the processes whose end is the server's; `report`: the pipe to its actor.

    `inherit`: a descriptor that the command gets too. `frees_orphans`: what the command forks and leaves is nobody's
    here. `guard`: the sentinel's, where `forked` is the guard's: of a server that was forked.
    """

    watch: tuple[Process, ...]
    report: int
    log: Path
    mark: str  # NAME=value, set for the server only: a later start must not end the guards as leftovers
    grace_s: float
    vital: str  # prefix of the names of those children without which the server is useless; may be empty
    files: str  # a path prefix: such files that the tree was seen to hold open are removed after it
    scratch: Path | None  # a folder made before the tree and removed after it
    inherit: int | None
    frees_orphans: bool
    guard: int | None
    forked: Forked | None
    command: tuple[str, ...]


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="process_guard")
    parser.add_argument("--watch", type=Process.parse, action="append", default=[])
    parser.add_argument("--report", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--mark", required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--vital", default="")
    parser.add_argument("--files", default="")
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--inherit", type=int)
    parser.add_argument("--frees-orphans", action="store_true")
    parser.add_argument("--guard", type=int)
    parser.add_argument("--sentinel", type=Process.parse)
    for of_the_forked in ("--server", "--output", "--gate"):
        parser.add_argument(of_the_forked, type=int)
    parser.add_argument("command", nargs="+")
    given = vars(parser.parse_args(arguments))
    taken = {name: given.pop(name) for name in ("sentinel", "server", "output", "gate")}
    forked = None if taken["server"] is None else Forked(**taken)
    return Options(**{**given, "watch": tuple(given["watch"]), "command": tuple(given["command"]), "forked": forked})


def options_of(words: Sequence[str]) -> Options:
    """Of the guard's command, from its interpreter on."""
    return parse(words[words.index(MODULE) + 1 :])


def with_options(words: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """The guard's command `words` with further options, before the command that it guards."""
    at = list(words).index("--")
    return [*words[:at], *(word for name, value in options.items() for word in (name, str(value))), *words[at:]]
