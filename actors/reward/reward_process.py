"""The parent's side of one process of the user's code: start, send, receive with a deadline, kill.

A plain subprocess and a socket pair rather than multiprocessing: the child imports nothing of the parent's main module
(in a Ray worker that is Ray itself), and a child that was killed while idle is noticed too.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from launcher.base.errors import RewardImportError
from launcher.config.data import RewardConfig

WORKER = Path(__file__).with_name("reward_worker.py")
RECEIVE_BYTES = 65536


class ProcessGone(Exception):
    """The process ended before it answered."""


STDERR = 2
_prints_to = STDERR
"""The descriptor that what the function prints goes to."""


def print_to(descriptor: int) -> None:
    """For all processes that are started from now on."""
    global _prints_to  # noqa: PLW0603 - one for a process, as its standard error is
    _prints_to = descriptor


class RewardProcess:
    """Starts without waiting. One thread sends, one receives; the end of the thread that made it ends the
    process too. Any thread may call `kill`."""

    def __init__(self, config: RewardConfig, *, episode: str | None = None) -> None:
        """Of the reward functions, or of the function that plays episodes."""
        self._setting = f"reward.fn={config.fn!r}" if episode is None else f"rollout.episode={episode!r}"
        self._ready_by = time.monotonic() + config.setup_timeout
        self._setup_timeout = config.setup_timeout
        self._ready = self.is_async = False
        self._received = b""
        self._held_at_first = 0
        self._running = os.fdopen(os.memfd_create("running"), "rb", buffering=0)
        self._socket, theirs = socket.socketpair()
        # Of one socket both directions would have one timeout: a thread that waits for an answer for an hour would
        # make another's message to a process that reads nothing wait as long.
        self._sending = self._socket.dup()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), self._running.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_prints_to,
                stderr=_prints_to,
                start_new_session=True,  # a separate group, so that what the function started is killed with it
            )
        hello = {
            "fn": config.fn,
            "episode": episode,
            "running": self._running.fileno(),
            "weights": list(config.weights),
            "timeout": config.timeout,
            "tracebacks": _prints_to != STDERR,  # into a log; a terminal gets one message
            "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
        }
        with suppress(OSError):  # it has ended already, which `wait_ready` reports
            self._sending.sendall(pickle.dumps(hello))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Until the function is imported. Raises RewardImportError where it can't be, or not in time."""
        if self._ready:
            return
        hint = "it is imported in a separate process; its output is in the log"
        try:
            message = self.receive(self._ready_by)
        except TimeoutError as error:
            what = f"{self._setting} was not imported within reward.setup_timeout={self._setup_timeout:g} s"
            raise RewardImportError(what, hint) from error
        except ProcessGone as error:
            raise RewardImportError(f"importing {self._setting} ended the process: {error}", hint) from error
        if "refused" in message:
            raise RewardImportError(*message["refused"])
        self._ready, self.is_async = True, bool(message["is_async"])

    def send(self, items: object, deadline: float) -> None:
        """Raises TimeoutError and ProcessGone."""
        self._sending.settimeout(_until(deadline))
        try:
            self._sending.sendall(pickle.dumps(items))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ProcessGone(self._obituary()) from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next answer. Raises TimeoutError and ProcessGone."""
        while b"\n" not in self._received:
            self._socket.settimeout(_until(deadline))
            try:
                chunk = self._socket.recv(RECEIVE_BYTES)
            except ConnectionResetError as error:
                raise ProcessGone(self._obituary()) from error
            if not chunk:
                raise ProcessGone(self._obituary())
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]

    def _obituary(self) -> str:
        """How it ended: its end of the socket is closed."""
        self.kill()
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def held_bytes(self) -> int:
        """Resident memory of the process alone; 0 where it has ended."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def grown_gb(self) -> float:
        """Since the first time that it was asked."""
        held = self.held_bytes()
        self._held_at_first = self._held_at_first or held
        return (held - self._held_at_first) / 1e9

    def running(self) -> int:
        """The number of the episode whose code runs on its loop, or ran when it ended; 0: none."""
        return int.from_bytes(os.pread(self._running.fileno(), 8, 0), sys.byteorder)

    def kill(self) -> None:
        """Kill it with all that it started. Doesn't wait; `bury` does."""
        if self._process.returncode is not None:
            return  # reaped: its pid may be another's by now
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def bury(self) -> None:
        self.kill()
        self._process.wait()
        self._sending.close()
        self._socket.close()
        self._running.close()


def _until(deadline: float) -> float:
    """Never 0, which would mean not to wait at all."""
    return max(deadline - time.monotonic(), 1e-3)
