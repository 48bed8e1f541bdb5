"""The current status of a live run in one small file, for its own driver and for every other reader.

    {fileroot}/logs/…/now.json     written about once a second, atomically

The actor that leads the run writes it (RunActor in actors/supervision/coordinator_actor.py), and the driver until that
actor has answered for the first time. So reading it needs no Ray, no token and no open port: whoever may read the run's
logs, on any machine that sees them, may read it. `beat` grows with each writing, whoever writes; one that has not
changed for long is of a run whose driver is gone, and with it the actor. How old the file is, no clock tells: one may
be set, and those of two machines need not agree. So a reader waits for the next beat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from launcher.base.durable import replace_file
from launcher.base.messages import EvalReport, ServerInfo, ServerState, TrainerStatus, Verdict
from launcher.run_files.journal import encode
from launcher.run_files.run_paths import LockFile, RunPaths, held_by_another, lock_file

EVERY_S = 1.0
WRITE_S = 0.2
"""A disk that works takes milliseconds; nobody waits longer for one that doesn't answer."""
BEAT_S = 8.0
"""A live run writes once a second, but not while its Coordinator is replaced, which takes some seconds."""
LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """What the file says of the driver, which the actor that writes after it can't know by itself."""

    attempt: int
    host: str
    pid: int
    address: str
    is_detached: bool
    began: float  # of the attempt, monotonic
    began_at: float  # the same in unix seconds, for an actor on another machine
    lock: LockFile | None  # of the run, while the driver held it

    @classmethod
    def of_this_process(cls, paths: RunPaths, attempt: int, *, address: str, is_detached: bool) -> Self:
        return cls(
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=address,
            is_detached=is_detached,
            began=time.monotonic(),
            began_at=time.time(),
            lock=lock_file(paths),
        )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began if self.host == socket.gethostname() else time.time() - self.began_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHealth:
    """One server as the HealthMonitor and the trainer's requests show it."""

    name: str
    state: ServerState
    verdict: Verdict
    weight_version: int | None = None
    reason: str = ""  # of the state, where it has one
    silent_s: float = 0.0  # for how long its actor has been asked in vain


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHealth:
    """The Coordinator's last look at the run, where that was a moment ago."""

    age_s: float  # of that look, when this was written
    trainer: Verdict | None  # None, like `rewards`: another project's command, which is judged by its steps
    rewards: Verdict | None
    servers: tuple[ServerHealth, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentStatus:
    """`elapsed_s`: since the attempt began. `status` is None until the trainer has answered, `health` while nobody has
    looked."""

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
    health: RunHealth | None = None


class CurrentStatusFile:
    """The writer's side. A failed write is not reported: the next one may succeed. While one does not return (a stalled
    disk), no other begins, and the writer goes on. `another`: who runs in this run's folder now, seen before a write;
    "" where nobody else is seen to."""

    def __init__(self, paths: RunPaths, driver: DriverFacts) -> None:
        """Goes on from what the writer before it has written in this attempt: a killed one is replaced by another."""
        self.driver = driver
        self.another = ""
        self._paths = paths
        self._written_at = float("-inf")
        self._writer: threading.Thread | None = None
        self._is_handed_over = False
        before = read_now(paths)
        if before is not None and before.attempt == driver.attempt:
            self._now = dataclasses.replace(before, health=None)
        else:
            self._now = CurrentStatus(
                attempt=driver.attempt,
                beat=0,
                host=driver.host,
                pid=driver.pid,
                address=driver.address,
                is_detached=driver.is_detached,
                elapsed_s=0.0,
            )

    def heard(self, status: TrainerStatus, servers: Sequence[ServerInfo], evals: Sequence[EvalReport]) -> None:
        self._now = dataclasses.replace(self._now, status=status, servers=tuple(servers), evals=tuple(evals))

    def judged(self, health: RunHealth | None) -> None:
        """What nobody has looked at now is not known, whatever it was before."""
        self._now = dataclasses.replace(self._now, health=health)

    def hand_over(self) -> None:
        """Another process writes from now on: two would overwrite each other. This one only looks for `another`."""
        self._is_handed_over = True

    def write_if_due(self) -> None:
        if time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    def write(self) -> None:
        if self._writer is not None and self._writer.is_alive():
            return
        self._written_at = time.monotonic()
        self._now = dataclasses.replace(self._now, beat=self._now.beat + 1, elapsed_s=self.driver.elapsed_s)
        content = encode(dataclasses.asdict(self._now))
        writer = threading.Thread(target=self._write, args=(content,), name="current status", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for another thread
            writer.start()
            self._writer = writer
            writer.join(WRITE_S)

    def _write(self, content: bytes) -> None:
        self.another = held_by_another(self._paths, self.driver.lock)
        if self.another or self._is_handed_over:
            return
        with contextlib.suppress(OSError):
            replace_file(self._paths.now, content, durable=False)


def read_now(paths: RunPaths) -> CurrentStatus | None:
    """None where there is none, or none that can be read. What another version's file has more is passed over."""
    try:
        found = json.loads(paths.now.read_bytes())  # msgspec's own reader refuses half a character, as of a file's name
        return msgspec.convert(found, CurrentStatus, strict=False)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return None


def next_beat(paths: RunPaths, within_s: float) -> CurrentStatus | None:
    """What the run writes next; None where it wrote nothing in that time, or nothing that can be read."""
    first: tuple[int, int] | None = None
    give_up_at = time.monotonic() + within_s
    while True:
        now = read_now(paths)
        beat = None if now is None else (now.attempt, now.beat)
        if first is not None and beat not in (None, first):
            return now
        first = first or beat
        if time.monotonic() >= give_up_at:
            return None
        time.sleep(LOOK_S)
