"""Ends a server's process tree when its owner is gone: `python -S -m actors.processes.process_guard [options] --
command`. A server that is forked instead of run (forked_start.py) gets its guards by exec, and is theirs all the same.

    actor ─ launcher (ends at once)
            sentinel     own session, child subreaper: all that loses its parent below here becomes its child
            └─ guard     own session, child subreaper, parent of the server
               └─ server own session, dies with the guard (parent-death signal)
                  └─ … its children, whatever sessions and parents they give themselves

The guard waits for the first of: a watched process gone (the actor's worker, the raylet), the server gone, a *vital*
child of the server gone, the sentinel gone, SIGTERM. A server or vital child that holds a lock (exit_notifier.py) is
known to be dying 0.1 s before it is gone. Then the guard ends the tree: SIGTERM to the server, a grace period, SIGKILL
to everything below the guard. The sentinel waits for the guard; however that one ended, it kills what is left below
itself and removes the files that it saw the server hold. So either of the two may be killed at any moment and nothing
escapes. If both are killed in the same instant, the server dies by its parent-death signal, and the next start ends its
daemons (`process_tree.bearing`).

The launcher forks and ends, since Ray kills a worker's direct children and its process group. The guard writes lines of
JSON to the descriptor `--report`: `started`, `ended` (exit code, cause, time), `swept`; end of file means that nothing
is left. A process in uninterruptible sleep, which no signal ends, is reported as `left`. What the server prints goes
through a pipe that the guard empties (log_drain.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from actors.processes.exit_notifier import VARIABLE, ExitNotifier
from actors.processes.guard_options import Options, parse
from actors.processes.log_drain import LogDrain, write_to
from actors.processes.process_tree import (
    Process,
    children,
    descendants,
    dying_with,
    end_all,
    files_with,
    held_files,
    identify,
    name,
    open_files,
    open_pidfd,
    reap,
)

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
NOT_MEANT_FOR_US = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""From a terminal, and from SGLang's children to their parent, which is the guard once the server has ended."""
SENTINEL, GUARD = "server-sentinel", "server-guard"
LET_GO = b"!"
TICK_MS, GIVE_UP_S, STUCK_S = 1000, 60.0, 3.0
libc = ctypes.CDLL(None, use_errno=True)


def tell(options: Options, event: str, **facts: object) -> None:
    """Write one line of the report. The actor that reads it may be gone: that is what the guard is for."""
    line = json.dumps({"event": event, "monotonic": time.monotonic(), "time": time.time()} | facts)
    with contextlib.suppress(BrokenPipeError):
        os.write(options.report, line.encode() + b"\n")


def become(title: str, *, frees_orphans: bool = False) -> None:
    """Lead a new session that adopts all orphans below it and ignores a terminal's signals."""
    os.setsid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, int(not frees_orphans), 0, 0, 0)
    be_called(title)
    for number in NOT_MEANT_FOR_US:
        signal.signal(number, signal.SIG_IGN)


def be_called(title: str) -> None:
    libc.prctl(PR_SET_NAME, title.encode(), 0, 0, 0)


def begin_as_sentinel(options: Options) -> Process:
    """What the sentinel does before it forks the guard; returns itself. Raises OSError."""
    become(SENTINEL, frees_orphans=options.frees_orphans)
    write_to(options.log)
    if options.scratch is not None:  # made by who removes it: an owner that is killed in between leaves none behind
        options.scratch.mkdir(mode=0o700)
    me = identify(os.getpid())
    assert me is not None
    return me


def die_with(guard: int) -> None:
    """In a child of `guard`: to be killed when that ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in NOT_MEANT_FOR_US:
        signal.signal(number, signal.SIG_DFL)  # what is ignored stays so across exec
    if os.getppid() != guard:  # it ended before the line above took effect
        os._exit(1)


# ── sentinel ──


class Sentinel:
    """Waits for the guard's end, then ends everything below and removes its files."""

    def __init__(self, options: Options, guard_pid: int) -> None:
        self._options = options
        self._guard_pid = guard_pid
        self._files = TreeFiles(options.files)
        self._owner_missing_since: float | None = None

    def run(self) -> None:
        ended = select.poll()
        ended.register(os.pidfd_open(self._guard_pid), select.POLLIN)  # its own child: the pid is not reused
        while not ended.poll(TICK_MS):
            self._see_to_the_guard()
            self._files.note()
        orphans = descendants(os.getpid())
        self._files.note()  # what orphans alone still hold
        left = end_all(GIVE_UP_S)
        self._files.remove()
        remove_scratch(self._options)
        tell(self._options, "swept", killed=[p.pid for p in orphans], left=[p.pid for p in left])

    def _see_to_the_guard(self) -> None:
        """Kill a guard that has not noticed that its owner is gone, since it is stopped (SIGSTOP)."""
        if all(identify(owner.pid) == owner for owner in self._options.watch):
            return
        self._owner_missing_since = self._owner_missing_since or time.monotonic()
        if time.monotonic() - self._owner_missing_since > self._options.grace_s + STUCK_S:
            os.kill(self._guard_pid, signal.SIGKILL)


class TreeFiles:
    """Shared memory of the tree: files whose paths begin with `prefix`, which outlive a killed process.

    Their names can't be known before, and a folder such as /dev/shm may be shared with containers whose processes
    can't be seen. So only what a process below this one was seen to hold open is removed. What is made and lost
    between two looks stays.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._listed: set[Path] = set()
        self._seen: set[Path] = set()

    def note(self) -> None:
        """Look who holds what, where a name has come or gone: that reads each descriptor of the tree."""
        listed = files_with(self._prefix) if self._prefix else set()
        if listed == self._listed:
            return
        self._listed = listed
        held = {file for process in descendants(os.getpid()) for file in open_files(process.pid, self._prefix)}
        self._seen = (self._seen | held) & listed  # a name that is gone may be another's when it comes again

    def remove(self) -> None:
        """Once the tree has ended. Another server may hold one of its files."""
        for file in self._seen - held_files(self._prefix) if self._seen else ():
            file.unlink(missing_ok=True)


def remove_scratch(options: Options) -> None:
    if options.scratch is not None:
        shutil.rmtree(options.scratch, ignore_errors=True)


# ── guard ──


class EndReason(NamedTuple):
    """Why the tree is ended. `words` is empty where the server ended by itself.

    `may_end_itself`: the server gets its grace period, and its exit code is waited for. `dying`: the process whose
    exit code can be read already.
    """

    words: str
    may_end_itself: bool = True
    dying: int | None = None


SERVER_ENDED = EndReason("")
SERVER_DIES = EndReason("", may_end_itself=False)
LOCKS = "exit_locks"
TOLD = "told to stop"


class Guard:
    """Parent of the server: starts it, waits for a reason to end it, ends everything below itself.

    Each reason is a descriptor that becomes readable: a pidfd, or a pipe that SIGTERM writes to.
    """

    def __init__(self, options: Options, sentinel: Process) -> None:
        self._options = options
        self._sentinel = sentinel
        self._causes: dict[int, EndReason] = {}
        self._poll = select.poll()
        self._vital: set[Process] = set()
        self._locks = None if options.scratch is None else ExitNotifier.make(options.scratch / LOCKS)
        self._locked: set[int] = set()
        self._exit_code: int | None = None
        self._output = LogDrain(options.log, source=None if options.forked is None else options.forked.output)
        self._wait_for_sigterm()
        self._owners_alive = all(
            [self._wait_for(owner, "the process that it belongs to") for owner in options.watch]
            + [self._wait_for(sentinel, "its sentinel")]
        )

    def run(self) -> None:
        if not self._owners_alive:
            tell(self._options, "failed", reason="the process that it belongs to was gone before it was started")
            remove_scratch(self._options)
            return
        try:
            self._server = self._start()
            self._server_end = os.pidfd_open(self._server)  # its own child, not collected: the pid isn't reused
        except OSError as error:
            tell(self._options, "failed", reason=f"{self._options.command[0]}: {error.strerror}")
            return
        tell(self._options, "started", guard=os.getpid(), sentinel=self._sentinel.pid, server=self._server)
        self._end(self._first_cause())
        remove_scratch(self._options)

    def _wait_for_sigterm(self) -> None:
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._add(woken, EndReason(TOLD))

    def _wait_for(self, process: Process, what: str, *, may_end_itself: bool = True) -> bool:
        descriptor = open_pidfd(process)
        if descriptor is not None:
            dying = None if may_end_itself else process.pid
            cause = EndReason(f"{what} (pid {process.pid}) is gone", may_end_itself, dying)
            self._add(descriptor, cause)
            self._wait_for_lock(process.pid, cause)
        return descriptor is not None

    def _wait_for_lock(self, pid: int, cause: EndReason) -> None:
        if self._locks is None or pid in self._locked or (opened := self._locks.opened(pid)) is None:
            return
        self._locked.add(pid)
        self._add(opened, cause)

    def _add(self, descriptor: int, cause: EndReason) -> None:
        self._causes[descriptor] = cause
        self._poll.register(descriptor, select.POLLIN)

    def _start(self) -> int:
        """The server's pid. Raises OSError where the command can't be run."""
        if (forked := self._options.forked) is not None:
            self._output.begin()
            with contextlib.suppress(ConnectionError):  # it has ended, which is seen as any end
                os.write(forked.gate, LET_GO)
            os.close(forked.gate)
            return forked.server
        me, inherit = os.getpid(), self._options.inherit
        name, _, value = self._options.mark.partition("=")
        locks = {} if self._locks is None else {VARIABLE: str(self._locks.path)}
        with self._output.entrance() as output:
            self._child = subprocess.Popen(  # kept: one that is let go collects a child that has ended
                self._options.command,
                env={**os.environ, **locks, name: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=() if inherit is None else (inherit,),
                preexec_fn=lambda: die_with(me),  # this process has a single thread as yet
            )
        if inherit is not None:
            os.close(inherit)
        self._output.begin()
        return self._child.pid

    def _first_cause(self) -> EndReason:
        """Wait. Among several causes, that the server ended by itself comes first."""
        self._add(self._server_end, SERVER_ENDED)
        while True:
            self._note_vital()
            ready = {descriptor for descriptor, _ in self._poll.poll(TICK_MS)}
            if ready:
                return self._causes[self._server_end if self._server_end in ready else ready.pop()]
            self._collect()

    def _note_vital(self) -> None:
        """SGLang notices the death of its scheduler after 1.3 s; a pidfd reports it at once."""
        self._wait_for_lock(self._server, SERVER_DIES)
        if not self._options.vital:
            return
        for child in children(self._server):
            if child not in self._vital and (title := name(child)).startswith(self._options.vital):
                self._vital.add(child)
                self._wait_for(child, f"its {title}", may_end_itself=False)

    def _end(self, cause: EndReason) -> None:
        if cause is SERVER_DIES:
            self._exit_code = dying_with(self._server)
            cause = SERVER_ENDED if self._exit_code is None else cause
        elif cause.dying is not None:
            self._exit_code = dying_with(cause.dying)
        self._output.settle()  # who hears of the end reads the log
        if not cause.may_end_itself:  # the kernel takes 0.1 s to free its memory: nobody need wait for that
            tell(self._options, "ended", exit_code=self._exit_code, cause=cause.words)
        elif self._options.grace_s > 0:
            self._end_server(signal.SIGTERM, self._options.grace_s)
        self._end_server(signal.SIGKILL, GIVE_UP_S)
        self._collect()
        self._output.settle()
        if cause.may_end_itself:
            tell(self._options, "ended", exit_code=self._exit_code, cause=cause.words)
        end_all(GIVE_UP_S)
        self._output.finish()

    def _end_server(self, number: signal.Signals, timeout_s: float) -> None:
        """Signal it and wait for its end. Harmless where it has ended: it stays a zombie until it is collected."""
        ended = select.poll()
        ended.register(self._server_end, select.POLLIN)
        if not ended.poll(0):
            signal.pidfd_send_signal(self._server_end, number)
            ended.poll(timeout_s * 1000)

    def _collect(self) -> None:
        status = reap().get(self._server)
        if status is not None:
            self._exit_code = os.waitstatus_to_exitcode(status)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.forked is not None:
        be_called(GUARD)
        Guard(options, options.forked.sentinel).run()
    elif options.guard is not None:
        be_called(SENTINEL)
        watch(options, options.guard)
    else:
        if os.fork():
            os._exit(0)
        me = begin_as_sentinel(options)
        if (guard := os.fork()) == 0:
            become(GUARD, frees_orphans=options.frees_orphans)
            Guard(options, sentinel=me).run()
        else:
            watch(options, guard)


def watch(options: Options, guard: int) -> None:
    """As the sentinel."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.inherit is not None:
        os.close(options.inherit)
    Sentinel(options, guard).run()


if __name__ == "__main__":
    main()
