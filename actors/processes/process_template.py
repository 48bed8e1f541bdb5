"""A template (forked_start.py) as its owner sees it on an asyncio loop: start it, order a server of it, end it.

It runs under a guard of its own, and ends with its owner in three ways: its guard sees the owner's end, its socket
closes, and the parent-death signal follows the guard's. What was forked of it lives on without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from dataclasses import replace

from actors.processes.forked_start import ORDERS, ForkOrder
from actors.processes.guarded_process import GuardedProcess, ProcessLaunch, end_bearing, guard_command
from actors.processes.process_tree import identify
from launcher.base.errors import ServerError

VARIES = ("TMPDIR",)
"""Of the environment, what a server may have of its own: nothing that is read at import."""
ANSWER_S = 15.0
"""For the guard of a forked server to report; it takes 0.2 s on an idle machine."""


class ProcessTemplate:
    """Made by `launch`. `identity` is None where it has ended at once, `ready` is done when servers can be forked of
    it, and raises ServerError where it ended before."""

    def __init__(self, launch: ProcessLaunch, process: GuardedProcess, orders: socket.socket) -> None:
        self.pid = process.pid
        self.identity = identify(process.pid)
        self._launch = launch
        self._process = process
        self._orders = orders
        self.ready = asyncio.ensure_future(self._become_ready())
        self.ready.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    @classmethod
    async def launch(cls, launch: ProcessLaunch) -> ProcessTemplate:
        """Returns while it imports. Raises ServerError, OSError."""
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                command = (*launch.command, ORDERS, str(theirs.fileno()))
                made = replace(launch, command=command, inherit=theirs.fileno(), frees_orphans=True)
                process = await GuardedProcess.launch(made)
        except BaseException:
            orders.close()
            raise
        orders.setblocking(False)
        return cls(launch, process, orders)

    def why_not(self, launch: ProcessLaunch) -> str:
        """Why a server of `launch` can't be forked of it, now or later; "" where it can."""
        if self._process.ended is not None or self.identity is None or identify(self.pid) != self.identity:
            return "it is gone"
        own, its = self._launch.environment, launch.environment
        names = (own.keys() | its.keys()).difference(VARIES)
        other = sorted(name for name in names if own.get(name) != its.get(name))
        return f"it was made with another {', '.join(other)}" if other else ""

    async def _become_ready(self) -> None:
        said = await asyncio.get_running_loop().sock_recv(self._orders, 4096)
        if not said:
            raise ServerError("it ended while it imported")
        if (threads := json.loads(said)["threads"]) > 1:
            raise ServerError(f"it has {threads} threads")

    async def fork(self, launch: ProcessLaunch) -> GuardedProcess:
        """A server, as `GuardedProcess.launch` starts one. Raises ServerError; then this template is not to be used
        again, as nobody knows what has become of the order."""
        await asyncio.to_thread(end_bearing, launch.mark, but=self.identity)
        variables = {name: launch.environment[name] for name in VARIES if name in launch.environment}
        order = ForkOrder(guard=tuple(guard_command(launch)), variables=variables)
        readable, writable = os.pipe()
        try:
            socket.send_fds(self._orders, [order.packed()], [writable])
        except (OSError, ValueError) as error:
            os.close(readable)
            raise ServerError(f"it can't be asked: {error}") from error
        finally:
            os.close(writable)
        return await GuardedProcess.reported(readable, launch.log, within_s=ANSWER_S)

    async def end(self) -> None:
        """Harmless where it has ended. Raises ServerError where it survives SIGKILL."""
        left = await self._process.end()
        self.ready.cancel()
        self._orders.close()
        if left:
            raise ServerError(f"processes {left} of a template survive SIGKILL", "they wait in the kernel")
