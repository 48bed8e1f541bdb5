"""The trainer's complete state after each step, in memory that outlives its process: a killed trainer loses no step.

    the slot that is not the newest:  manifest removed ─► files overwritten in place ─► new manifest renamed into place

Two slots in turn: a kill at any instant leaves the older state or the newer one, complete. Overwriting in place costs a
third of new files, since the pages are there already; so a state that once fitted always fits. Nothing is synced:
the memory outlives the process and not the machine, and what must survive that is the checkpoint on the disk.

A state counts only for the run that wrote it, and only while the checkpoint that was the newest then is still there:
after checkpoints are deleted by hand, newer in-memory states are ignored. So is one whose step a later attempt, on
another machine, has undone. Files are opaque here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import msgspec
import xxhash

from launcher.base.durable import replace_file
from launcher.base.errors import CheckpointError, DiskError, JournalError, StorageError
from launcher.base.private_folders import could_be_ours
from launcher.checkpoints.checkpoint_folder import READ_HINT, Checkpoint
from launcher.checkpoints.manifest import CRC32, MANIFEST_NAME, XXH3, FileRecord, find_faults, inside
from launcher.config.fingerprint import Fingerprint
from launcher.run_files.journal import current_line, encode, newest_line, number_of, read_lines
from launcher.run_files.run_id import read_run_id
from launcher.run_files.run_paths import RunPaths

MEMORY_BACKED = Path("/dev/shm")
FORMAT = "grpo-memory-state/2"
FORMAT_OF_BEFORE = "grpo-memory-state/1"
"""Its files have a `crc32`. Read for one version: a run that is upgraded between two attempts loses no step."""
SLOTS = ("slot-0", "slot-1")
LEFT_FREE = 0.2
"""Of the free memory: the servers' weights take theirs later."""
UNUSABLE = "an older state or a checkpoint is used instead"


def memory_folder(paths: RunPaths, kind: str) -> Path:
    """One folder for each run and kind, so that its next attempt finds what this one was killed over.

    Memory-backed where all of the run is on one machine; else below its logs, where each node sees it. Raises OSError.
    """
    shared = MEMORY_BACKED / "-".join(filter(None, ("grpo", kind, read_run_id(paths.logs), _digest(paths))))
    if paths.several_machines.exists():
        return paths.logs / shared.name
    return shared if os.access(MEMORY_BACKED, os.W_OK) and could_be_ours(shared) else paths.logs / shared.name


def name_run(paths: RunPaths) -> None:
    """Before the first attempt of a run: write its id.

    What a run left in memory that was at this path, and saw these mounts, is removed: its logs are gone. A run that
    was copied without its hidden files gets a new id. Raises StorageError.
    """
    try:
        if paths.attempt_counter.exists():
            return
        here = mounts()
        if not paths.events.exists():
            for left in MEMORY_BACKED.glob(f"grpo-*-{here}-{_digest(paths)}*"):  # and `….server-<i>`
                shutil.rmtree(left, ignore_errors=True)
        replace_file(paths.run_id, f"{os.urandom(4).hex()}-{here}\n".encode())
    except OSError as error:
        raise StorageError(
            f"{paths.run_id} can't be written: {error.strerror}", "look at the disk of cluster.fileroot"
        ) from error


def mounts() -> str:
    """Of this process: its mount namespace, and what is mounted there as the root, as a container's own layers are.
    The kernel gives the number of a namespace that has ended to the next one. Raises OSError."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    root = [line.split(maxsplit=3)[3] for line in lines if line.split()[4] == "/"]
    return hashlib.sha256(f"{Path('/proc/self/ns/mnt').stat().st_ino} {root}".encode()).hexdigest()[:8]


def _digest(paths: RunPaths) -> str:
    return hashlib.sha256(str(paths.checkpoints.resolve()).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """What its manifest says of a state.

    `run`: when the run began. `base`, `base_made_at`: its newest checkpoint on the disk then, None where it had none.
    `attempt`: whose step it was; states of before don't say, and say more that nobody reads.
    """

    global_step: int
    run: float | None
    base: str | None
    base_made_at: float | None
    config_fingerprint: Fingerprint
    attempt: int | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Raises TypeError where one is missing."""
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemoryCheckpoint:
    """A state that claims to be complete, which `verify` checks."""

    path: Path
    created_at: float
    facts: StateFacts
    files: Mapping[str, FileRecord]

    @property
    def global_step(self) -> int:
        return self.facts.global_step

    @property
    def config_fingerprint(self) -> Fingerprint:
        return self.facts.config_fingerprint

    def __str__(self) -> str:
        return f"the state after step {self.global_step} in memory"

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What the manifest of a slot says; None where it has none, or none that can be read."""
        try:
            data = json.loads((folder / MANIFEST_NAME).read_bytes())
            if data["format"] not in (FORMAT, FORMAT_OF_BEFORE):
                return None
            return cls(
                path=folder,
                created_at=float(data["created_at"]),
                facts=StateFacts.of(data["facts"]),
                files={inside(name): _record(**record) for name, record in data["files"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def verify(self) -> None:
        """Every file in its length, with its checksum. Raises CheckpointError naming the first that differs; DiskError
        where one is there and can't be read now."""
        faults = find_faults(self.path, self.files)
        if unread := [fault for fault in faults if fault.is_unread]:
            raise DiskError(unread[0].text, READ_HINT)
        if faults:
            raise CheckpointError(faults[0].text, UNUSABLE)


class InMemoryCheckpoints:
    """The states of one run. Asking creates nothing; one process writes, any number may read."""

    def __init__(self, paths: RunPaths) -> None:
        self._root = memory_folder(paths, "state")
        self._events = paths.events
        self._ledger = paths.ledger
        self._stand: Mapping[tuple[int, float], bool] = {}

    @property
    def root(self) -> Path:
        return self._root

    def run_began(self) -> float | None:
        """The time of the run's first event, which no other run of the same name shares."""
        first = next(iter(read_lines(self._events)), {}).get("time")
        return first if isinstance(first, float) else None

    # ── reading ──

    def current(self, checkpoints: Sequence[Checkpoint]) -> list[InMemoryCheckpoint]:
        """Those that count beside these checkpoints on the disk, the newest last."""
        found = self._all()
        run = self.run_began() if found else None
        mine = [state for state in found if state.facts.run == run and _base_is_there(state.facts, checkpoints)]
        self._stand = stand = {key_of(state): self._stands(state) for state in mine}
        return [state for state in mine if stand[key_of(state)]]

    def _stands(self, state: InMemoryCheckpoint) -> bool:
        """Whether the run has not gone on from elsewhere since: an attempt on another machine can drop no state here.
        Looked up once: while this process lives, no other attempt takes steps."""
        attempt, known = state.facts.attempt, self._stand.get(key_of(state))
        if attempt is None or known is not None:
            return known is not False
        try:
            if number_of(newest_line(self._ledger).get("attempt"), attempt) <= attempt:
                return True
            return (current_line(self._ledger, state.global_step) or {}).get("attempt") == attempt
        except OSError as error:
            raise JournalError(f"{self._ledger} can't be read: {error.strerror}", "look at its disk") from error

    def newest_complete(self, checkpoints: Sequence[Checkpoint]) -> InMemoryCheckpoint | None:
        """The newest that counts and is verified complete now."""
        for state in reversed(self.current(checkpoints)):
            try:
                state.verify()
            except CheckpointError:
                continue
            return state
        return None

    def _all(self) -> list[InMemoryCheckpoint]:
        found = [state for slot in SLOTS if (state := InMemoryCheckpoint.read(self._root / slot)) is not None]
        return sorted(found, key=lambda state: state.global_step)

    # ── writing ──

    def slots_that_fit(self, size: int, memory_free: float) -> int:
        """How many states of `size` bytes there is room for, from 0 to 2; what lies there already makes room.

        `memory_free`: bytes of this host's memory, within the container's limit.
        """
        taken = sum(file.stat().st_size for file in self._root.rglob("*") if file.is_file())
        room = (1 - LEFT_FREE) * self._free(memory_free) + taken
        return min(len(SLOTS), int(room // max(1, size)))

    def _free(self, memory_free: float) -> float:
        free = float(shutil.disk_usage(self._root.parent).free)
        return min(free, memory_free) if self._root.parent == MEMORY_BACKED else free

    def begin(self, slots: int) -> Path:
        """The slot to overwrite: empty, or else the older one, which from now on counts no more. Raises OSError."""
        used = {state.path: state.global_step for state in self._all()}
        folder = min((self._root / name for name in SLOTS[:slots]), key=lambda slot: used.get(slot, -1))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        return folder

    def commit(self, folder: Path, facts: StateFacts, files: Mapping[str, FileRecord]) -> None:
        """From the rename on this is the newest state. Raises OSError."""
        staged = folder / f".{MANIFEST_NAME}"
        written = msgspec.to_builtins(files)
        manifest = {"format": FORMAT, "created_at": time.time(), "facts": asdict(facts), "files": written}
        staged.write_bytes(encode(manifest))
        staged.rename(folder / MANIFEST_NAME)

    def drop_after(self, global_step: int) -> None:
        """States of later steps count no more. Raises DiskError where one stays."""
        for state in self._all():
            if state.global_step > global_step:
                self.drop(state)

    def drop(self, state: InMemoryCheckpoint) -> None:
        """Raises DiskError where it stays."""
        try:
            (state.path / MANIFEST_NAME).unlink(missing_ok=True)
        except OSError as error:
            raise DiskError(
                f"{state} stays, {state.path / MANIFEST_NAME} can't be removed: {error.strerror or error}",
                "see to its disk, or remove the file yourself",
            ) from error

    def remove(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _record(*, bytes: int, checksum: str | None = None, crc32: int = 0) -> FileRecord:
    return FileRecord(bytes=bytes, checksum=checksum or f"{CRC32}:{crc32:08x}")


def key_of(state: InMemoryCheckpoint) -> tuple[int, float]:
    return state.global_step, state.created_at


def _base_is_there(facts: StateFacts, checkpoints: Sequence[Checkpoint]) -> bool:
    """One whose manifest is damaged has not been removed by anybody."""
    return facts.base is None or any(
        str(checkpoint) == facts.base
        and (checkpoint.manifest is None or checkpoint.manifest.created_at == facts.base_made_at)
        for checkpoint in checkpoints
    )


def write_small(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """A file of a slot, as JSON. Raises OSError."""
    data = json.dumps(content).encode()
    path.write_bytes(data)
    return FileRecord(bytes=len(data), checksum=f"{XXH3}:{xxhash.xxh3_128(data).hexdigest()}")
