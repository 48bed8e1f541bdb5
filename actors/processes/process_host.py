"""Runs the servers of one actor, one after the other, and leaves nothing of them: `python -S -m
actors.processes.process_host --orders SOCKET LOG OWNER …`.

    actor ═ socket ═ host      own session, child subreaper: all that loses its parent below here becomes its child
                     └─ server own session; the kernel kills it when the host ends (parent-death signal)
                        └─ …   its children, whatever sessions and parents they give themselves

One poll waits for orders, for the end of an owner (the actor's worker, the raylet), for SIGTERM and for the end of the
server or of a *vital* child of it. Between two polls the host reads whether one of those has begun to die: the kernel
says so before it frees their memory, and a pidfd only afterwards. However the server ends, all that is left below the
host is killed, and so is what it is told to end with. The end of the socket is the actor's.

A host that has imported what its servers need (`serve` with `preload`) forks them; else they are run as programs. What
they print goes through a pipe into the log (log_drain.py), whose threads end with the server: a fork is never made
where a second thread could hold a lock.

The actor gets messages of JSON: `hosting`, `ready`, then for each server `started` or `failed`, `files` (what it shares
in memory), `ended` (exit code, cause, time) and `swept`. If the host is killed, the server dies with it, and the actor
ends what else bears the mark (hosted_process.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from actors.processes.log_drain import LogDrain, write_to
from actors.processes.process_tree import (
    DeathWatch,
    Process,
    children,
    descendants,
    dying_with,
    end_all,
    files_with,
    name,
    open_files,
    open_pidfd,
    process_of,
    reap,
    remove_unheld,
)
from launcher.base.parent_death import adopt_orphans, end_with

PR_SET_NAME = 15  # linux/prctl.h
NOT_MEANT_FOR_US = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""From a terminal, and from SGLang's children to their parent, which is the host once the server has ended."""
HOST = "process-host"
"""By this name its processes are told from what it runs, which may have its command line."""
ORDERS = "--orders"
"""Followed by the last words of a host's command: the descriptor of its socket, the log, and its owners."""
TOLD = "told to stop"
TICK_MS = 25  # half of it is the mean delay of the news that a server dies; a look takes 10 µs
LOOK_S = 1.0  # between two looks for new children and files, which read the whole tree
GIVE_UP_S = 60.0  # a process in uninterruptible sleep outlives SIGKILL: it is reported, and not waited for
LONGEST_MESSAGE = 2**17  # bytes; the kernel's usual room for one message is 212,992
libc = ctypes.CDLL(None)


def serve(words: Sequence[str], preload: Callable[[], object] | None = None) -> list[str]:
    """Be the host that the command `words` asks for. Returns in a server that was forked, with its command."""
    descriptor, log, *owners = words[words.index(ORDERS) + 1 :]
    if os.fork():  # Ray kills a worker's direct children and its process group
        os._exit(0)
    os.setsid()
    title = Path("/proc/self/comm").read_bytes().strip()
    adopt_orphans()
    libc.prctl(PR_SET_NAME, HOST.encode(), 0, 0, 0)
    for number in NOT_MEANT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    write_to(Path(log))
    actor = socket.socket(fileno=int(descriptor))
    actor.set_inheritable(False)
    actor.send(json.dumps({"event": "hosting", "pid": os.getpid()}).encode())
    if preload is not None:
        _be_signalled(actor, signal.SIGKILL)  # imports take long, and nobody here would notice the actor's end
        preload()
        gc.freeze()  # a collection would write to each object, and so copy the memory that is shared
    _be_signalled(actor, signal.SIGCONT)  # a host that is stopped would let its server outlive the actor
    return Host(actor, Path(log), [Process.parse(owner) for owner in owners], forks=preload is not None).run(title)


def _be_signalled(actor: socket.socket, number: signal.Signals) -> None:
    """The kernel sends this process `number` with each message of the actor, and when the actor is gone."""
    fcntl.fcntl(actor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(actor, fcntl.F_SETSIG, number)
    fcntl.fcntl(actor, fcntl.F_SETFL, fcntl.fcntl(actor, fcntl.F_GETFL) | os.O_ASYNC)
    if number == signal.SIGKILL and select.select([actor], [], [], 0)[0]:  # it ended before the lines above
        sys.exit(0)


def die_with(parent: int, memory_limit: int | None) -> None:
    """In a child of `parent`: be killed when that ends, and take signals as a new program does."""
    end_with(parent, signal.SIGKILL, code=1)()
    signal.set_wakeup_fd(-1)
    for number in (*NOT_MEANT_FOR_US, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # what is ignored stays so across exec
    if memory_limit is not None:  # VmData of each process in /proc/PID/status; mapped files don't count
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))


class End(NamedTuple):
    """Why a server is ended. `cause` is empty where it ended by itself; `is_told`: before it is gone."""

    cause: str = ""
    exit_code: int | None = None
    is_told: bool = False


class Server:
    """The one that runs now."""

    def __init__(self, order: dict[str, Any], pid: int, drain: LogDrain) -> None:
        self.pid = pid
        self.drain = drain
        self.grace_s = float(order["grace_s"])
        self.files = TreeFiles(order["files"])
        self._own = DeathWatch(process_of(pid))  # the host's own child, not collected: the pid isn't reused
        self._vital: list[DeathWatch] = []
        self._scratch = order["scratch"]
        self._prefix = order["vital"]
        self._status: int | None = None

    def seen_end(self, ready: set[int]) -> End | None:
        """Of the server, or of a child that it can't live without: SGLang takes 1.3 s to notice that itself."""
        for watch in (self._own, *self._vital):
            if watch.ended in ready or watch.is_dying():
                code = dying_with(watch.process.pid)
                if watch is self._own:
                    return End(exit_code=code, is_told=code is not None)
                return End(f"its {watch.title} (pid {watch.process.pid}) is gone", code, is_told=True)
        return None

    def new_vital(self) -> list[int]:
        """Descriptors that become readable at the end of a vital child, of those that were not seen before."""
        known = {watch.process for watch in self._vital}
        new = []
        for child in children(self.pid) if self._prefix else ():
            if child not in known and name(child).startswith(self._prefix):
                with contextlib.suppress(OSError):  # it has just ended, and so will the server
                    new.append(DeathWatch(child))
        self._vital += new
        return [watch.ended for watch in new]

    def collect(self) -> int | None:
        """Collect ended children; the server's exit code, once it is among them."""
        self._status = reap().get(self.pid, self._status)
        return None if self._status is None else os.waitstatus_to_exitcode(self._status)

    def signal(self, number: signal.Signals, within_s: float) -> None:
        """And wait for its end. Harmless where it has ended: the pidfd knows."""
        ended = select.poll()
        ended.register(self._own.ended, select.POLLIN)
        if not ended.poll(0):
            signal.pidfd_send_signal(self._own.ended, number)
            signal.pidfd_send_signal(self._own.ended, signal.SIGCONT)  # one that is stopped takes no SIGTERM before
            ended.poll(within_s * 1000)

    def descriptors(self) -> list[int]:
        return [watch.ended for watch in (self._own, *self._vital)]

    def clear(self) -> None:
        """Once its tree has ended."""
        self.drain.finish()
        self.files.remove()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        for watch in (self._own, *self._vital):
            watch.close()


class TreeFiles:
    """Shared memory of the tree: files whose paths begin with `prefix`, which outlive a killed process.

    Their names can't be known before, and a folder such as /dev/shm may be shared with containers whose processes
    can't be seen. So only what a process below this one was seen to hold open is removed. What is made and lost
    between two looks stays.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._listed: set[Path] = set()
        self.seen: set[Path] = set()

    def note(self) -> bool:
        """Look who holds what, where a name has come or gone, as that reads each descriptor of the tree. Whether
        `seen` has changed."""
        listed = files_with(self._prefix) if self._prefix else set()
        if listed == self._listed:
            return False
        self._listed = listed
        held = {file for process in descendants(os.getpid()) for file in open_files(process.pid, self._prefix)}
        before = self.seen
        self.seen = (self.seen | held) & listed  # a name that is gone may be another's later
        return self.seen != before

    def remove(self) -> None:
        remove_unheld(self.seen, self._prefix)


class Host:
    """Starts servers as the actor orders, and ends each with all below it."""

    def __init__(self, actor: socket.socket, log: Path, owners: Sequence[Process], *, forks: bool) -> None:
        self._actor = actor
        self._log = log
        self._forks = forks
        self._server: Server | None = None
        self._look_at = 0.0
        self._over = ""
        woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._wake)
        self._reasons = {woken: TOLD}
        for owner in owners:
            gone = f"the process that it belongs to (pid {owner.pid}) is gone"
            if (descriptor := open_pidfd(owner)) is None:
                self._over = gone
            else:
                self._reasons[descriptor] = gone
        self._poll = select.poll()
        for descriptor in (actor.fileno(), *self._reasons):
            self._poll.register(descriptor, select.POLLIN)

    def run(self, title: bytes) -> list[str]:
        """Until it is over. `title`: what a forked server is called, in which alone this returns."""
        self._tell("ready")
        while not self._over:
            ready = {descriptor for descriptor, _ in self._poll.poll(TICK_MS if self._server else None)}
            if self._server is not None and (end := self._server.seen_end(ready)) is not None:
                self._end(self._server, end)  # first: an end of its own is told as such, whatever came with it
            elif over := ready & self._reasons.keys():
                self._over = self._reasons[over.pop()]
            elif self._actor.fileno() in ready:
                if command := self._take_order(title):
                    return command
            elif self._server is not None and time.monotonic() >= self._look_at:
                self._look_at_server(self._server)
        if self._server is not None:
            self._end(self._server, End(self._over))
        end_all(GIVE_UP_S)
        sys.exit(0)

    def _look_at_server(self, server: Server) -> None:
        self._look_at = time.monotonic() + LOOK_S
        server.collect()
        for descriptor in server.new_vital():
            self._poll.register(descriptor, select.POLLIN)
        if server.files.note():
            self._tell("files", files=[str(file) for file in server.files.seen])

    def _take_order(self, title: bytes) -> list[str]:
        """The command, in a server that was forked."""
        message = b""
        with contextlib.suppress(ConnectionError):  # the actor is gone, and has not read all
            message = self._actor.recv(LONGEST_MESSAGE)
        match json.loads(message or b"{}"):
            case {"start": order}:
                return self._start(order, title)
            case {"stop": pid}:
                if self._server is not None and self._server.pid == pid:  # it may have ended meanwhile
                    self._end(self._server, End(TOLD))
            case _:
                self._over = TOLD if message else "its actor is gone"
        return []

    def _start(self, order: dict[str, Any], title: bytes) -> list[str]:
        """The command, in a server that was forked."""
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only their number is wanted
        if self._forks and threads > 1:
            self._tell("failed", reason=f"its host has {threads} threads, and can't be forked")
            return []
        drain = LogDrain(self._log)
        try:
            if order["scratch"] is not None:  # made by who removes it: an actor that is killed leaves none behind
                Path(order["scratch"]).mkdir(mode=0o700)
            with drain.entrance() as output:
                pid = self._fork(order, output, title) if self._forks else self._run(order, output)
        except OSError as error:
            self._tell("failed", reason=f"{error.filename or order['command'][0]}: {error.strerror}")
            drain.cancel()
            if order["scratch"] is not None:
                shutil.rmtree(order["scratch"], ignore_errors=True)
            return []
        if pid == 0:
            drain.cancel()
            return list(order["command"])
        drain.begin()
        self._server = Server(order, pid, drain)
        for descriptor in self._server.descriptors():
            self._poll.register(descriptor, select.POLLIN)
        self._look_at = 0.0
        self._tell("started", pid=pid)
        return []

    def _run(self, order: dict[str, Any], output: int) -> int:
        """As a program; its pid. Raises OSError."""
        self._child = subprocess.Popen(  # kept: one that is let go collects a child that has ended
            order["command"],
            env={key: value for key, value in {**os.environ, **order["changes"]}.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid(), order["memory_limit"]),  # noqa: PLW1509 - the host has a single thread now
        )
        return self._child.pid

    def _fork(self, order: dict[str, Any], output: int, title: bytes) -> int:
        """Its pid; 0 in the server, which then has nothing of the host's that it would not have as a program."""
        me = os.getpid()
        if pid := os.fork():
            return pid
        try:
            os.setsid()
            die_with(me, order["memory_limit"])
            libc.prctl(PR_SET_NAME, title, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for standard in (sys.stdout, sys.stderr):
                os.dup2(output, standard.fileno())
            self._actor.close()
            for descriptor in (*self._reasons, self._wake):
                os.close(descriptor)
            # Only these: setproctitle finds a process's title below the first variable that it was started with.
            for key, value in order["changes"].items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
            tempfile.tempdir = None
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed()  # from the system; `random` does so by itself after a fork
        except BaseException:  # noqa: BLE001 - whatever it is, this is not the host
            traceback.print_exc()
            os._exit(1)
        return 0

    def _end(self, server: Server, end: End) -> None:
        """Say how it ended, kill all below this process, remove its files, and say that nothing is left."""
        for descriptor in server.descriptors():
            self._poll.unregister(descriptor)
        server.drain.settle()  # who hears of the end reads the log
        if end.is_told:  # the kernel takes 0.1 s to free its memory: nobody need wait for that
            self._tell_end(server, end.exit_code, end.cause)
        elif end.cause and server.grace_s > 0:
            server.signal(signal.SIGTERM, server.grace_s)
        server.files.note()  # what it has made since the last look would stay: afterwards nobody holds it open
        server.signal(signal.SIGKILL, GIVE_UP_S)
        code = server.collect()
        if not end.is_told:
            server.drain.settle()
            self._tell_end(server, code, end.cause)
        left = end_all(GIVE_UP_S)
        server.clear()
        self._server = None
        self._tell("swept", pid=server.pid, left=[one.pid for one in left])

    def _tell_end(self, server: Server, exit_code: int | None, cause: str) -> None:
        now = {"monotonic": time.monotonic(), "time": time.time()}
        self._tell("ended", pid=server.pid, exit_code=exit_code, cause=cause, **now)

    def _tell(self, event: str, **facts: object) -> None:
        with contextlib.suppress(OSError):  # the actor may be gone: that is what the host is for
            self._actor.send(json.dumps({"event": event} | facts).encode())


if __name__ == "__main__":
    serve(sys.argv)
