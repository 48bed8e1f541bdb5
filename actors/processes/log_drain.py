"""Takes what a process prints to its log, whatever the disk does: a pipe, a bounded buffer, and two threads.

    server ─► pipe ─► thread `read` ─► buffer ─► thread `write` ─► log
                      never waits                waits for the disk

So a disk that is full, read-only or stalled neither blocks nor ends who prints. While it refuses, the buffer keeps the
newest output, and what it had to drop is counted and said in the log when the disk takes lines again. Standard library
only: a process host runs it. The host lives as long as its server, whoever else is killed, and a server without its
host is ended: no pipe is left without a reader.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

PIPE_BYTES = 2**20
"""As far as the kernel grants it (fs.pipe-max-size): room for what is printed while this process is not scheduled."""
BUFFER_BYTES = 4 * 2**20
CHUNK = 2**16
SETTLE_S = 0.05
"""For the last lines to reach the log; on a disk that works that takes less than a millisecond."""
LAST_S = 5.0
"""For the same where this process ends too and would take them with it: a disk that is merely slow gets them."""
AGAIN_S = 0.5
"""Between two tries while the disk refuses."""


class LogDrain:
    """`entrance` for the process that prints, once; then `begin`, or `cancel` where nothing prints. `dropped`: bytes
    that found no room in the buffer."""

    def __init__(self, log: Path, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._log = log
        self._buffer_bytes = buffer_bytes
        source, self._entrance = os.pipe()
        with contextlib.suppress(OSError):  # not granted: the kernel's default stays
            fcntl.fcntl(self._entrance, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._source: int | None = source
        self._threads: list[threading.Thread] = []
        self._gives_up = False
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._is_writing = False
        self._file: int | None = None
        self._why = ""
        self._is_midline = False
        self._changed = threading.Condition()
        self.dropped = 0

    @contextlib.contextmanager
    def entrance(self) -> Iterator[int]:
        """The descriptor to print to; closed here after the block, so that the pipe ends with its last writer."""
        try:
            yield self._entrance
        finally:
            os.close(self._entrance)

    def begin(self) -> None:
        """From now on the pipe is emptied, until its last writer has ended."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def cancel(self) -> None:
        """In place of `begin`."""
        if self._source is not None:
            os.close(self._source)
            self._source = None

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Returns when all that was printed so far is in the log, or after `timeout_s`."""
        give_up_at = time.monotonic() + timeout_s
        with self._changed:
            while self._is_behind() and time.monotonic() < give_up_at:
                self._changed.wait(0.001)

    def finish(self) -> None:
        """Once nobody prints any more. A disk that refuses is not waited for, as nobody knows for how long. Then both
        threads have ended, except where a disk does not even answer."""
        self.settle()
        give_up_at = time.monotonic() + LAST_S
        with self._changed:
            while self._is_behind() and not self._why and time.monotonic() < give_up_at:
                self._changed.wait(0.01)
            self._gives_up = True
        for thread in self._threads:
            thread.join(2 * AGAIN_S)

    def _is_behind(self) -> bool:
        unread = array.array("i", [0])
        if self._source is not None:
            fcntl.ioctl(self._source, termios.FIONREAD, unread)
        return bool(unread[0] or self._chunks or self._is_writing)

    def _read(self) -> None:
        assert self._source is not None
        something = select.poll()
        something.register(self._source, select.POLLIN)
        while True:
            something.poll()
            with self._changed:  # what is read is seen by `settle` in the pipe or in the buffer, and never in neither
                data = os.read(self._source, CHUNK)
                if not data:
                    os.close(self._source)
                    self._source = None
                    self._changed.notify_all()
                    return
                self._chunks.append(data)
                self._held += len(data)
                while self._held > self._buffer_bytes:
                    gone = self._chunks.popleft()
                    self._held -= len(gone)
                    self.dropped += len(gone)
                self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._chunks:
                    if self._source is None:
                        return
                    self._changed.wait()
                data = self._chunks.popleft()
                self._held -= len(data)
                self._is_writing = True
            self._put(data)
            with self._changed:
                self._is_writing = False
                is_idle = not self._chunks
                self._changed.notify_all()
            if is_idle:
                self._close()  # a parked trainer is known by having no log open

    def _put(self, data: bytes) -> None:
        """Returns when the disk has taken it, or is not to be asked again."""
        while data and not (self._why and self._gives_up):
            try:
                if self._file is None:
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                    self._file = os.open(self._log, flags, 0o644)
                if self._why or self.dropped:
                    self._say_what_was_dropped(self._file)
                written = os.write(self._file, data)
                self._is_midline = not data[:written].endswith(b"\n")
                data = data[written:]
            except OSError as error:
                self._why = error.strerror or str(error)
                self._close()  # what was mounted anew takes nothing from a descriptor of before
                time.sleep(AGAIN_S)

    def _close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)

    def _say_what_was_dropped(self, file: int) -> None:
        """Raises OSError; a line of which a part was refused is said again."""
        with self._changed:
            dropped = self.dropped
        lost = f"{dropped} bytes were lost" if dropped else "nothing was lost"
        what = f"could not be written ({self._why})" if self._why else "was not written as fast as it came"
        begin = "\n" if self._is_midline else ""
        os.write(file, f"{begin}==== this log {what}; {lost}\n".encode())
        self._is_midline = False
        with self._changed:
            self.dropped -= dropped
        self._why = ""


def write_to(log: Path) -> None:
    """This process's own output goes to the log, or nowhere where a disk refuses the file."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for standard in (sys.stdout, sys.stderr):
        os.dup2(descriptor, standard.fileno())
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, sys.stdin.fileno())
    for opened in (descriptor, null):
        os.close(opened)
