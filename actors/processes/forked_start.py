"""Forks servers off a process that has imported what they need (a *template*), each under guards of its own.

    template ─ launcher (ends at once)
               sentinel ─┐ exec process_guard.py: they are as light as those of a server that was not forked
               └─ guard ─┘
                  └─ server waits at its gate, until the guard lets it go; then it is called as a new program is

An exec leaves pid, parent, children and session as they are. So below the sentinel all is as process_guard.py draws it,
and whoever is killed at whichever moment, nothing is left: before its exec, the end of one shows to the next as the end
of a pipe or by its parent-death signal, and after it as the guard sees it. The template collects the launcher and
knows nothing of what it forked: its own end is nobody else's.

Orders come through a socket whose other end only the template's owner has; its end is the template's. Standard
library only.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from actors.processes.exit_notifier import VARIABLE
from actors.processes.guard_options import Options, options_of, with_options
from actors.processes.log_drain import printing_pipe
from actors.processes.process_guard import (
    GUARD,
    LET_GO,
    LOCKS,
    be_called,
    become,
    begin_as_sentinel,
    die_with,
)

ORDERS = "--orders"
"""The last option of a template's command; the descriptor of its socket follows."""
LONGEST_ORDER = 2**17
"""Bytes; the kernel's usual room for one message is 212,992."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """`guard`: the guard's command with that of the server (`guarded_process.guard_command`). `variables`: of the
    server's environment, where it differs from the template's."""

    guard: tuple[str, ...]
    variables: Mapping[str, str]

    def packed(self) -> bytes:
        """Raises ValueError where it is too long to be sent in one message."""
        made = json.dumps({"guard": self.guard, "variables": dict(self.variables)}).encode()
        if len(made) > LONGEST_ORDER:
            raise ValueError(f"its command has {len(made)} bytes, of which {LONGEST_ORDER} can be sent")
        return made

    @classmethod
    def of(cls, packed: bytes) -> Self:
        given = json.loads(packed)
        return cls(guard=tuple(given["guard"]), variables=given["variables"])


def serve_orders(orders: int) -> tuple[str, ...]:
    """In the template: say that it is ready, and fork a server for each order. Returns in each server, once its guard
    has let it go, with its command. Ends the process when its owner has closed the other end, or is gone, and where it
    has more than one thread: another may hold a lock that its fork would wait for forever."""
    began_with = _environment_of_start()
    with socket.socket(fileno=orders) as owner:
        owner.set_inheritable(False)
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their number is wanted
        owner.send(json.dumps({"threads": threads}).encode())
        if threads > 1:
            sys.exit(f"it has {threads} threads, and can't be forked")
        gc.freeze()  # a collection would write to each object, and so copy the memory that is shared
        while True:
            message, received, _, _ = socket.recv_fds(owner, LONGEST_ORDER, 1)
            if not message or not received:
                sys.exit(0)
            (report,) = received
            os.set_inheritable(report, False)
            order = ForkOrder.of(message)
            launcher = os.fork()
            if launcher == 0:
                break
            os.close(report)
            os.waitpid(launcher, 0)
    command: tuple[str, ...] = ()
    try:
        command = _start(order, report, began_with)
    finally:
        if not command:
            traceback.print_exc()
            os._exit(1)
    return command


def _environment_of_start() -> dict[str, str]:
    """As this process was started: imports may have added to `os.environ`, which a guard has no use for."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {name: value for entry in entries if entry for name, _, value in [os.fsdecode(entry).partition("=")]}


def _start(order: ForkOrder, report: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """In the launcher; returns in the server alone. Raises OSError."""
    if os.fork():
        os._exit(0)
    words = with_options(order.guard, {"--report": report})
    options = options_of(words)
    environment = {**environment, **order.variables}
    mine = Path("/proc/self/comm").read_text().strip()
    me = begin_as_sentinel(options)
    output, entrance = printing_pipe()
    guard = os.fork()
    if guard:
        os.close(output)
        os.close(entrance)
        _become_guard(with_options(words, {"--guard": guard}), environment, options)
    become(GUARD)
    guard = os.getpid()
    gate, entry = socket.socketpair()
    server = os.fork()
    if server:
        entry.close()
        os.close(entrance)
        gate.recv(1)  # or its end, which the guard will see
        forked = {"--sentinel": me, "--server": server, "--output": output, "--gate": gate.fileno()}
        _become_guard(with_options(words, forked), environment, options, output, gate.fileno())
    be_called(mine)
    die_with(guard)
    os.setsid()
    for descriptor in (report, output):
        os.close(descriptor)
    gate.close()
    _print_to(entrance)
    entry.send(LET_GO)
    if entry.recv(1) != LET_GO:
        os._exit(1)
    entry.close()
    _be_a_new_program(order, options)
    return options.command


def _become_guard(
    words: Sequence[str], environment: Mapping[str, str], options: Options, *descriptors: int
) -> NoReturn:
    """By exec, with the report and `descriptors`. Raises OSError."""
    for descriptor in (options.report, *descriptors):
        os.set_inheritable(descriptor, True)
    of_the_server = (options.mark.partition("=")[0], VARIABLE)
    os.execve(words[0], [*words], {name: value for name, value in environment.items() if name not in of_the_server})


def _print_to(entrance: int) -> None:
    for standard in (1, 2):
        os.dup2(entrance, standard)
    os.close(entrance)


def _be_a_new_program(order: ForkOrder, options: Options) -> None:
    """Undo what this process has from the template, and would not have if it had been run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order.variables)
    if options.scratch is not None:
        os.environ[VARIABLE] = str(options.scratch / LOCKS)
    tempfile.tempdir = None
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # from the system; `random` does so by itself after a fork
