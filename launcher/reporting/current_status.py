"""The current status of a live run in one small file, for readers other than its driver.

    {fileroot}/logs/…/now.json     written by the driver about once a second, atomically

So reading it needs no Ray, no token and no open port: whoever may read the run's logs, on any machine that sees them,
may read it. `beat` grows with each writing; one that has not changed for long is of a driver that is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from launcher.base.durable import replace_file
from launcher.base.messages import EvalReport, ServerInfo, ServerState, Snapshot, TrainerStatus
from launcher.run_files.journal import encode
from launcher.run_files.run_paths import RunPaths, held_by_another, lock_file

EVERY_S = 1.0
WRITE_S = 0.2
"""A disk that works takes milliseconds; nobody waits longer for one that doesn't answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentStatus:
    """`elapsed_s`: since the attempt began. `status` is None until the trainer has answered."""

    attempt: int
    beat: int
    host: str
    pid: int
    address: str
    is_detached: bool
    elapsed_s: float
    status: TrainerStatus | None = None
    servers: tuple[ServerInfo, ...] = ()
    evals: tuple[EvalReport, ...] = ()


class CurrentStatusFile:
    """The driver's side. A failed write is not reported: the next one may succeed. While one does not return (a stalled
    disk), no other begins, and the driver goes on. `another`: who runs in this run's folder now, seen before a write;
    "" where nobody else is seen to."""

    def __init__(self, paths: RunPaths, attempt: int, *, address: str, is_detached: bool) -> None:
        self._paths = paths
        self._began = time.monotonic()
        self._written_at = float("-inf")
        self._writer: threading.Thread | None = None
        self._lock = lock_file(paths)
        self.another = ""
        self._now = CurrentStatus(
            attempt=attempt,
            beat=0,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=address,
            is_detached=is_detached,
            elapsed_s=0.0,
        )

    def heard(self, snapshot: Snapshot) -> None:
        self._now = dataclasses.replace(
            self._now, status=snapshot.status, servers=snapshot.servers, evals=snapshot.evals
        )

    def write_if_due(self) -> None:
        at = time.monotonic()
        if at - self._written_at < EVERY_S or (self._writer is not None and self._writer.is_alive()):
            return
        self._written_at = at
        self._now = dataclasses.replace(self._now, beat=self._now.beat + 1, elapsed_s=at - self._began)
        content = encode(dataclasses.asdict(self._now))
        writer = threading.Thread(target=self._write, args=(content,), name="current status", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for another thread
            writer.start()
            self._writer = writer
            writer.join(WRITE_S)

    def _write(self, content: bytes) -> None:
        self.another = held_by_another(self._paths, self._lock)
        if self.another:
            return
        with contextlib.suppress(OSError):
            replace_file(self._paths.now, content, durable=False)


def read_now(paths: RunPaths) -> CurrentStatus | None:
    """None where there is none, or none that can be read."""
    try:
        data: dict[str, Any] = json.loads(paths.now.read_bytes())
        status = data.pop("status")
        servers = tuple(_server(one) for one in data.pop("servers"))
        evals = tuple(EvalReport(**one) for one in data.pop("evals"))
        return CurrentStatus(
            **data, status=None if status is None else TrainerStatus(**status), servers=servers, evals=evals
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _server(data: dict[str, Any]) -> ServerInfo:
    data.pop("gpus", None)  # in files of before: GPUs that a server had moved to
    return ServerInfo(**{**data, "state": ServerState(data["state"])})
