"""One process of the user's code, and several of one kind: started, asked, watched, killed and replaced.

    ask ─► a pickled order ─► actors/reward/reward_worker.py ─► lines of JSON with its number ─► Asked

Reward functions and episodes share it. All of it is used on one asyncio loop. A plain subprocess and a socket pair
rather than multiprocessing: the child imports nothing of the parent's main module (in a Ray worker that is Ray itself),
and a child that was killed while idle is noticed too. No Ray actors: a dry run scores without Ray, and a Ray worker has
120 MiB more, is never quite idle, and takes twice as long for a batch.

Waits for: the process's lines. Unblocked by: a line, or the process's end, which fails all that it was asked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from actors.processes.exit_watch import process_ended
from launcher.base.errors import RewardError, RewardImportError
from launcher.base.wording import signal_name
from launcher.config.data import RewardConfig

WORKER = Path(__file__).with_name("reward_worker.py")
RECEIVE_BYTES = 65536
IMPORT_HINT = "it is imported in a separate process; its output is in the log"

log = logging.getLogger("reward")


TRIES = 2
"""A process may be killed from outside while it imports; one that is killed twice was killed by what it imports."""


class ProcessGone(Exception):
    """The process ended before it answered."""


class KilledWhileImporting(RewardImportError):
    """By a signal, which the user's code may have nothing to do with."""


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """An order, and its answers so far. `done`: all `count` are there. It raises ProcessGone where the process ends
    before, and TimeoutError where one answer takes longer than `within_s`."""

    count: int
    within_s: float | None
    done: asyncio.Future[None]
    last_at: float  # on the loop's clock: when it was asked, or got its last answer
    answers: list[dict[str, Any]] = field(default_factory=list)
    look: asyncio.TimerHandle | None = None


STDERR = 2
_prints_to = STDERR
"""The descriptor that what the function prints goes to."""


def print_to(descriptor: int) -> None:
    """For all processes that are started from now on."""
    global _prints_to  # noqa: PLW0603 - one for a process, as its standard error is
    _prints_to = descriptor


class UserProcess(asyncio.BufferedProtocol):
    """Starts without waiting; `ready` before `ask`. The end of the loop's thread ends the process too."""

    def __init__(self, config: RewardConfig, *, episode: str | None = None) -> None:
        """Of the reward functions, or of the function that plays episodes. Raises RewardError where no process can be
        started."""
        self.setting = f"reward.fn={config.fn!r}" if episode is None else f"rollout.episode={episode!r}"
        self.is_async = False
        self.is_gone = False
        self.is_killed = False
        self._loop = asyncio.get_running_loop()
        self._setup_timeout = config.setup_timeout
        self._ready_by = self._loop.time() + config.setup_timeout
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._unanswered: dict[int, Asked] = {}
        self._numbers = itertools.count(1)  # 0 in the shared memory means that no episode's code runs
        self._last_run: Asked | None = None
        self._received = b""
        self._buffer = bytearray(RECEIVE_BYTES)  # asyncio's own would be made anew for each line, of 256 KiB
        self._has_answered = False
        self._held_at_first = 0
        self._transport: Any = None
        self._running = os.fdopen(os.memfd_create("running"), "rb", buffering=0)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(WORKER), str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno(), self._running.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=_prints_to,
                    stderr=_prints_to,
                    start_new_session=True,  # a separate group, so that what the function started is killed with it
                )
            except OSError as error:
                ours.close()
                self._running.close()
                raise RewardError(f"no process for {self.setting} can be started: {error}", "") from error
        self._hello = {
            "fn": config.fn,
            "episode": episode,
            "running": self._running.fileno(),
            "weights": list(config.weights),
            "timeout": config.timeout,
            "tracebacks": _prints_to != STDERR,  # into a log; a terminal gets one message
            "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
        }
        self._watching = self._loop.create_task(self._watch(ours))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unanswered(self) -> list[Asked]:
        return list(self._unanswered.values())

    async def ready(self) -> None:
        """Until the user's code is imported. Raises RewardImportError where it can't be, or not in time."""
        if not self._ready.done():
            await asyncio.wait({self._ready}, timeout=max(self._ready_by - self._loop.time(), 0))
        if not self._ready.done():
            what = f"{self.setting} was not imported within reward.setup_timeout={self._setup_timeout:g} s"
            _fail(self._ready, RewardImportError(what, IMPORT_HINT))
            self.kill()
        self._ready.result()

    def ask(self, order: Mapping[str, object], count: int = 1, *, within_s: float | None = None) -> Asked:
        """Gets `count` answers, one after the other. The process is told where its `done` is cancelled. Raises
        RewardError where the order can't be pickled."""
        asked = Asked(count=count, within_s=within_s, done=self._loop.create_future(), last_at=self._loop.time())
        if self.is_gone:
            _fail(asked.done, ProcessGone("before it was asked"))
            return asked
        number = next(self._numbers)
        try:
            message = pickle.dumps({"id": number, **order})
        except Exception as error:  # a record may hold any object, which raises what it likes
            what = f"a record can't be sent to the process of {self.setting}: {type(error).__name__}: {error}"
            raise RewardError(what, "a data set is to hold texts, numbers, lists and dicts") from error
        self._unanswered[number] = asked  # only what is sent: what is never answered would count as work for ever
        asked.done.add_done_callback(partial(self._forget, number))
        self._transport.write(message)
        self._look_at_call(asked)
        return asked

    async def is_awake(self, within_s: float) -> bool:
        """Whether its loop answers: code that never awaits keeps all of its episodes waiting."""
        try:
            await self.ask({"ping": True}, within_s=within_s).done
        except (TimeoutError, ProcessGone):
            return False
        return True

    def was_running(self, asked: Asked) -> bool | None:
        """Whether that episode's code was what the process ran when it ended or was killed. None: it ran none, or one
        that isn't known."""
        return None if self._last_run is None else self._last_run is asked

    def held_bytes(self) -> int:
        """Resident memory of the process alone; 0 where it has ended."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def grown_gb(self) -> float:
        """Since its first answers: what the user's code has loaded by then is no growth."""
        if not self._has_answered:
            return 0.0
        self._has_answered = False  # until it answers again there is nothing new to measure, and /proc is slow
        held = self.held_bytes()
        self._held_at_first = self._held_at_first or held
        return (held - self._held_at_first) / 1e9

    def kill(self) -> None:
        """Kill it with all that it started. Doesn't wait; `close` does."""
        self._note_last_run()
        self.is_killed = True
        self._kill_group()

    async def close(self) -> None:
        self.kill()
        await self._watching
        await self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send(self._hello)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        *lines, self._received = (self._received + self._buffer[:nbytes]).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if number := said.pop("id", 0):
                self._take_answer(number, said)
            else:
                self._begin(said)

    def connection_lost(self, exc: Exception | None) -> None:
        self._note_last_run()
        self.is_gone = True
        self._kill_group()
        code = self._process.wait()
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        kind = KilledWhileImporting if code < 0 else RewardImportError
        _fail(self._ready, kind(f"importing {self.setting} ended the process: {how}", IMPORT_HINT))
        for asked in self.unanswered:
            _fail(asked.done, ProcessGone(how))
        self._running.close()
        self._lost.set_result(None)

    async def _watch(self, ours: socket.socket) -> None:
        await self._loop.create_unix_connection(lambda: self, sock=ours)
        await process_ended(self.pid)
        self._kill_group()
        while not self.is_gone and select.select([ours], [], [], 0)[0]:
            await asyncio.sleep(0)  # what it answered is still read
        self._transport.abort()  # a process that it forked may hold the line open, and its end would never be noticed

    def _begin(self, said: Mapping[str, Any]) -> None:
        if "refused" in said:
            _fail(self._ready, RewardImportError(*said["refused"]))
        elif not self._ready.done():
            self.is_async = bool(said["is_async"])
            self._ready.set_result(None)

    def _take_answer(self, number: int, answer: dict[str, Any]) -> None:
        self._has_answered = True
        if (asked := self._unanswered.get(number)) is not None:
            asked.answers.append(answer)
            asked.last_at = self._loop.time()
            if len(asked.answers) == asked.count and not asked.done.done():
                asked.done.set_result(None)

    def _send(self, message: object) -> None:
        self._transport.write(pickle.dumps(message))

    def _look_at_call(self, asked: Asked) -> None:
        """One timer for all answers of an order: a timer for each would take longer than most of them."""
        if asked.within_s is None or asked.done.done():
            return
        until = asked.last_at + asked.within_s
        if self._loop.time() < until:
            asked.look = self._loop.call_at(until, self._look_at_call, asked)
        else:
            _fail(asked.done, TimeoutError())

    def _forget(self, number: int, done: asyncio.Future[None]) -> None:
        asked = self._unanswered.pop(number)
        if asked.look is not None:
            asked.look.cancel()
        if done.cancelled() and not self.is_gone:
            self._send({"cancel": number})

    def _note_last_run(self) -> None:
        if not (self.is_killed or self.is_gone):
            number = int.from_bytes(os.pread(self._running.fileno(), 8, 0), sys.byteorder)
            self._last_run = self._unanswered.get(number)

    def _kill_group(self) -> None:
        if self._process.returncode is None:  # once it is reaped its pid may be another's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _fail(waited_for: asyncio.Future[Any], error: Exception) -> None:
    """Unless it is known already."""
    if not waited_for.done():
        waited_for.set_exception(error)
        waited_for.exception()  # nobody may be waiting, which asyncio would log


class UserProcesses:
    """`count` of one kind. One that has ended, was killed or has grown is replaced when it is looked at."""

    def __init__(self, make: Callable[[], UserProcess], count: int, *, most_growth_gb: float | None) -> None:
        self._make = make
        self._most_growth_gb = most_growth_gb
        self._processes = [make() for _ in range(count)]
        self._burials: dict[asyncio.Task[None], UserProcess] = {}
        self._users = [0] * count
        self._times_used = [0] * count

    def at(self, place: int) -> UserProcess:
        """Raises RewardError where no process can be started."""
        process = self._processes[place]
        if process.is_gone or process.is_killed or self._has_grown(process):
            self._processes[place] = self._make()
            burial = asyncio.create_task(_bury(process))
            self._burials[burial] = process
            burial.add_done_callback(self._burials.pop)
        return self._processes[place]

    def kill(self, place: int) -> None:
        self._processes[place].kill()

    async def ready_at(self, place: int) -> UserProcess:
        """Has imported the user's code. Raises RewardImportError where it can't be, and as `at` does."""
        tries = 0
        while True:
            process = self.at(place)
            try:
                await process.ready()
            except KilledWhileImporting:
                tries += 1
                if process.is_killed or tries == TRIES:
                    raise
            else:
                return process

    @contextmanager
    def place_of_least_busy(self) -> Iterator[int]:
        """The place counts as busier inside the block. Those who wait while it imports are counted too, or all would
        choose the first one."""
        places = range(len(self._processes))
        place = min(places, key=lambda one: (self._users[one], self._times_used[one]))
        self._users[place] += 1
        self._times_used[place] += 1
        try:
            yield place
        finally:
            self._users[place] -= 1

    async def close(self) -> None:
        for process in (*self._processes, *self._burials.values()):
            process.kill()
        await asyncio.gather(*(process.close() for process in self._processes), *self._burials)

    def _has_grown(self, process: UserProcess) -> bool:
        most = self._most_growth_gb
        if most is None or (grown := process.grown_gb()) <= most:
            return False
        what = f"{process.setting} has grown by {grown:.1f} GB since its first completions"
        log.warning("reward.process_replaced reason=%r", f"{what}, more than reward.max_growth_gb={most:g}")
        return True


async def _bury(process: UserProcess) -> None:
    """One that has grown first answers what it was asked."""
    while unanswered := process.unanswered:
        await asyncio.wait([asked.done for asked in unanswered])
    await process.close()
