"""A person's restore: one small file says which checkpoint the run goes back to, and the run does it once.

    setup_recovery: restore.json ─► renamed to restore.taking.json by whoever takes it ─► later checkpoints set aside,
    memory dropped ─► (a running trainer loads it) ─► recovery.taken in the journal ─► removed

A launch takes it before it starts anything; of a run that is running its Coordinator does, while the trainer is paused.
Of two that were asked for before the run took one, the later counts. Killed anywhere, whoever comes next begins it
again: no step is trained before the file is gone, and once the journal has its `restore_count`, it is only removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.durable import replace_file, sync_folder
from launcher.base.errors import CheckpointError, ConfigError, DiskError, StorageError
from launcher.checkpoints.checkpoint_folder import Checkpoint, list_folder, refuse_unread, verify_checkpoint
from launcher.checkpoints.checkpoint_store import SET_ASIDE, CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.run_files.journal import Journal, encode, read_events
from launcher.run_files.run_order import TAKEN
from launcher.run_files.run_paths import RunPaths

FORCED = "forced although: "
AGAIN_OR_UNDO = "set it up again, or take it back: python -m scripts.setup_recovery --undo"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """The content of restore.json. Times are unix seconds."""

    step: int
    made_at: float  # of which checkpoint: after a restore a step may have two, one of them set aside
    restore_count: int  # which of the run's restores by a person it is, from 1
    why: str
    condemn_after: int | None  # checkpoints of later steps hold damage; None: none is known
    asked_at: float

    @property
    def forced(self) -> str:
        """What spoke against the checkpoint, where it was chosen all the same."""
        return self.why.partition(FORCED)[2]


# ── what setup_recovery does ──


def ask_restore(paths: RunPaths, checkpoint: Checkpoint, *, why: str, condemn_after: int | None) -> RestoreRequest:
    """Have the run go back to `checkpoint`, one of its own that was verified. Raises CheckpointError, with all as it
    was."""
    assert checkpoint.manifest is not None
    # In the order in which one that is taken meanwhile moves: two of the same number would count as one.
    known = [one.restore_count for one in (asked_before(paths), _readable(paths.restore_taking)) if one is not None]
    request = RestoreRequest(
        step=checkpoint.global_step,
        made_at=checkpoint.manifest.created_at,
        restore_count=1 + max([*known, *_counts_taken(paths)], default=0),
        why=why,
        condemn_after=condemn_after,
        asked_at=time.time(),
    )
    try:
        for left in paths.checkpoints.glob(f".{paths.restore.name}.*"):  # by a kill; of two at once one may be refused
            left.unlink(missing_ok=True)
        replace_file(paths.restore, encode(dataclasses.asdict(request)))
    except OSError as error:
        raise CheckpointError(
            f"{paths.restore} was not written: {error.strerror or error}", "is there room, may we write there?"
        ) from error
    return request


def asked_before(paths: RunPaths) -> RestoreRequest | None:
    """What another `ask_restore` would take the place of; None where that can't be read, too."""
    return _readable(paths.restore)


def withdraw_restore(paths: RunPaths) -> str:
    """Take back what nobody has taken yet; returns what holds now. Raises StorageError where there is no such thing."""
    try:
        paths.restore.unlink()  # who takes it renames it first: one of the two finds it, never both
        sync_folder(paths.checkpoints)
    except FileNotFoundError:
        if (taking := pending_restore(paths)) is not None:
            raise StorageError(
                f"the run is going back to step {taking.step} already: later checkpoints may be set aside by now",
                "to go elsewhere, set up another restore: it follows",
            ) from None
        raise StorageError(
            f"there is no {paths.restore}: nothing is set up",
            "one that the run has taken is undone by another restore; what it set aside is in "
            f"{paths.default_checkpoints / SET_ASIDE}: --checkpoint-path takes it",
        ) from None
    except OSError as error:
        raise StorageError(f"{paths.restore} can't be removed: {error.strerror}", "may we write there?") from error
    taking = pending_restore(paths)
    return "nothing is set up" if taking is None else f"the run is going back to step {taking.step}, as asked before"


# ── what whoever takes it does ──


def read_request(paths: RunPaths) -> RestoreRequest | None:
    """What was asked for last, or is being taken. Raises StorageError where it can't be read."""
    return _read(paths.restore) or _read(paths.restore_taking)


def pending_restore(paths: RunPaths) -> RestoreRequest | None:
    """The same, unless it was done and only its file is left."""
    request = read_request(paths)
    return None if request is None or request.restore_count in _counts_taken(paths) else request


def asked_checkpoint(paths: RunPaths) -> Checkpoint | None:
    """What the next launch is to resume from, verified; None where nobody has asked for anything. Raises ConfigError
    where it can't be taken, with nothing changed."""
    refuse_old_form(paths)
    request = pending_restore(paths)
    if request is None:
        return None
    try:
        return _verified(paths, request)
    except CheckpointError as error:
        raise ConfigError(f"{paths.restore}: {error.message}", AGAIN_OR_UNDO) from error


def refuse_old_form(paths: RunPaths) -> None:
    """Raises ConfigError where a version before this one has set up a restore, in a form that is taken no more."""
    if (folder := paths.recover_checkpoint).is_dir():
        raise ConfigError(
            f"{folder} is a restore that an earlier version set up, and this version does not take it",
            "move that folder away, and set the restore up again: python -m scripts.setup_recovery",
        )


def restore_is_asked(paths: RunPaths) -> bool:
    """Whether any checkpoint may be the one that was asked for: none is removed meanwhile."""
    return paths.restore.exists() or paths.restore_taking.exists()


def take_restore(paths: RunPaths, journal: Journal) -> Checkpoint | None:
    """Make what was asked for the newest checkpoint of the run, and the only thing there is to resume from; None: there
    is nothing to take. For whoever holds the run's lock and has started nothing. Raises CheckpointError."""
    taken = go_back(paths)
    if taken is None:
        return None
    journal.record(TAKEN, **taken.facts)
    finish_restore(paths)
    return taken.checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """`set_aside`: names below set_aside/."""

    request: RestoreRequest
    checkpoint: Checkpoint
    set_aside: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Of the event `recovery.taken`."""
        return {
            "subject": str(self.checkpoint),
            "reason": self.request.why,
            "global_step": self.request.step,
            "set_aside": list(self.set_aside),
            "restore_count": self.request.restore_count,
        }


def go_back(paths: RunPaths, is_over: Callable[[], bool] = lambda: False) -> Taken | None:
    """All but the trainer's load. None: it was taken back, or done before. May be begun again wherever it was cut off.
    `is_over`: asked before each change, whether the order has been given up meanwhile, since the disk stalled: another
    may have done it, and steps may have been taken since. Raises CheckpointError, as DiskError where nothing is known
    of the checkpoint; then TimeoutError too."""

    def go_on(what: object) -> None:
        if is_over():
            raise TimeoutError(f"{what} stays: the order was given up")

    request = _claim(paths)
    if request is None:
        return None
    if request.restore_count in _counts_taken(paths):
        finish_restore(paths)
        return None
    checkpoint = _verified(paths, request)  # before anything is moved: if it is damaged, the others are still needed
    store, step = CheckpointStore(paths.default_checkpoints), request.step
    go_on(store.root)
    InMemoryCheckpoints(paths).drop_after(step - 1)  # a state of this very step may be of another branch
    aside: list[Path] = []
    if request.condemn_after is not None:
        aside += store.condemn_after(max(step, request.condemn_after), go_on)
    aside += store.set_aside_after(step, go_on)
    if checkpoint.path.parent != store.root:
        aside += store.set_aside_after(step - 1, go_on)
        go_on(checkpoint.path)
        (place,) = store.reinstate(step - 1, [checkpoint.path.name])
        checkpoint = dataclasses.replace(checkpoint, path=place)
    return Taken(request=request, checkpoint=checkpoint, set_aside=tuple(path.name for path in aside))


def finish_restore(paths: RunPaths) -> None:
    """It was done, or refused. Before any step is trained: else a launch would go back once more. Raises
    CheckpointError."""
    try:
        paths.restore_taking.unlink(missing_ok=True)
        sync_folder(paths.checkpoints)
    except OSError as error:
        raise CheckpointError(
            f"{paths.restore_taking} can't be removed: {error.strerror}", "else each launch would go back: remove it"
        ) from error


def _claim(paths: RunPaths) -> RestoreRequest | None:
    """From here on nobody takes it back. Raises DiskError where its disk doesn't take that."""
    try:
        with contextlib.suppress(FileNotFoundError):
            paths.restore.rename(paths.restore_taking)
            sync_folder(paths.checkpoints)
    except OSError as error:
        raise DiskError(f"{paths.restore} can't be taken: {error.strerror}", "look at its disk") from error
    return _read(paths.restore_taking)


def _read(file: Path) -> RestoreRequest | None:
    """None where there is none. Raises StorageError."""
    try:
        data = json.loads(file.read_bytes())
        after = data["condemn_after"]
        return RestoreRequest(
            step=int(data["step"]),
            made_at=float(data["made_at"]),
            restore_count=int(data["restore_count"]),
            why=str(data["why"]),
            condemn_after=None if after is None else int(after),
            asked_at=float(data["asked_at"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{file} can't be read: {error!r}", f"remove it, and {AGAIN_OR_UNDO}") from error


def _readable(file: Path) -> RestoreRequest | None:
    with contextlib.suppress(StorageError):
        return _read(file)
    return None


def _counts_taken(paths: RunPaths) -> set[int]:
    counts = (event.get("restore_count") for event in read_events(paths.events) if event.get("event") == TAKEN)
    return {count for count in counts if isinstance(count, int)}


def _verified(paths: RunPaths, request: RestoreRequest) -> Checkpoint:
    """The checkpoint that was asked for, wherever it lies now. Raises CheckpointError."""
    root = paths.default_checkpoints
    for one in (*list_folder(root), *list_folder(root / SET_ASIDE)):
        if one.global_step != request.step or one.manifest is None or one.manifest.created_at != request.made_at:
            continue
        try:
            verify_checkpoint(one.path)
        except CheckpointError as error:
            refuse_unread(one.path)
            raise CheckpointError(f"what is set up is not complete: {error.message}", AGAIN_OR_UNDO) from error
        return one
    raise CheckpointError(f"what is set up, a checkpoint of step {request.step}, is not in {root}", AGAIN_OR_UNDO)
