"""Writes checkpoints: stage → hash → sync → rename. A crash at any moment leaves the old state or the complete new one.

    stage ──► .staging-<name>-<x>/ ──(caller writes files)──► commit: manifest, fsync, rename ──► <name>/
                                                                                                   │ prune
    set_aside/<name>.<why>-<n>/ ◄── damaged, or of steps that a restore threw away                ▼
                                                                                   .trash-<name>-<x>/ ──► gone

Files are opaque here: no torch, no model. One process writes (the run's lock sees to that); any number may read,
since reading changes nothing. What a crash left staged or half deleted is removed by the next `stage`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from launcher.base.durable import make_folder, sync_file, sync_folder
from launcher.base.errors import CheckpointError, DiskError, LauncherError
from launcher.checkpoints.checkpoint_folder import (
    Checkpoint,
    CheckpointName,
    CheckpointState,
    NewestComplete,
    check_checkpoint_sizes,
    list_folder,
    read_checkpoint,
    refuse_unread,
    verify_checkpoint,
)
from launcher.checkpoints.manifest import (
    FORMAT,
    KEEP_MARK,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    WrittenPart,
    record_files,
)
from launcher.config.fingerprint import Fingerprint

__all__ = ["Checkpoint", "CheckpointName", "CheckpointState", "CheckpointStore"]

log = logging.getLogger(__name__)

STAGING = ".staging-"
TRASH = ".trash-"
SET_ASIDE = "set_aside"
Telling = Callable[[Path], object]
NOBODY: Telling = lambda target: None  # noqa: E731


class CheckpointStore:
    """The checkpoints below `root` (RunPaths.default_checkpoints). Asking creates nothing; only `stage` does."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self._clock = clock
        self._staged: set[Path] = set()
        self._verified: set[Path] = set()  # committed or verified in this process: need no second hashing

    # ── writing ──

    def stage(self, name: CheckpointName) -> Path:
        """A new empty folder on the same filesystem, which only `commit` makes visible. Raises CheckpointError."""
        staged = self.root / f"{STAGING}{name}-{secrets.token_hex(4)}"
        try:
            make_folder(self.root)
            self.clean()
            staged.mkdir()
        except OSError as error:
            raise self._not_written(name, error) from error
        self._staged.add(staged)
        return staged

    @contextlib.contextmanager
    def staging(self, name: CheckpointName) -> Iterator[Path]:
        """`stage`, and on any exception `abandon`. What a writer of tensors raises becomes a CheckpointError."""
        staged = self.stage(name)
        try:
            yield staged
        except LauncherError:
            raise
        except Exception as error:  # torch and safetensors report a full disk as errors of their own kinds
            raise self._not_written(name, error) from error
        finally:
            self.abandon(staged)

    def abandon(self, staged: Path) -> None:
        """Remove a staged folder; nothing to do after its commit. What resists is removed by a later `stage`."""
        self._staged.discard(staged)
        shutil.rmtree(staged, ignore_errors=True)

    def commit(
        self,
        staged: Path,
        *,
        global_step: int,
        policy_version: int,
        config_fingerprint: Fingerprint,
        health: Mapping[str, object],
        keep: bool,
        files: Mapping[str, FileRecord] | None = None,
        written: Mapping[str, Sequence[WrittenPart]] | None = None,
    ) -> Checkpoint:
        """Make a staged folder a checkpoint: durable and complete on return, or not there at all.

        `keep`: retention never removes it. `files`: of one that was fetched, as they were verified: with others it
        would not be the one that it was fetched from. `written`: what the trainer's ranks wrote, which is looked for.
        A damaged checkpoint of the same name is set aside. Raises CheckpointError, with the staged folder removed,
        where one of that name is complete already (after a restore to an older step, call `set_aside_after` first) and
        where the disk refuses.
        """
        name = self._name_of_staged(staged, global_step)
        try:
            manifest = Manifest(
                format=FORMAT,
                global_step=global_step,
                policy_version=policy_version,
                created_at=self._clock(),
                files=record_files(staged, written) if files is None else _synced(staged, files),
                config_fingerprint=dict(config_fingerprint),
                health=dict(health),
            )
            _seal(staged, manifest, keep=keep)
            self._make_way(name)
            staged.rename(self.root / str(name))
            sync_folder(self.root)
        except OSError as error:
            raise self._not_written(name, error) from error
        finally:
            self.abandon(staged)
        self._verified.add(self.root / str(name))
        return read_checkpoint(self.root / str(name), name)

    def _name_of_staged(self, staged: Path, global_step: int) -> CheckpointName:
        text = staged.name.removeprefix(STAGING).rpartition("-")[0]
        name = CheckpointName.parse(text)
        if staged.parent != self.root or name is None or name.global_step != global_step:
            raise CheckpointError(
                f"{staged} was not staged here for step {global_step}", "commit what `stage` returned"
            )
        return name

    def _make_way(self, name: CheckpointName) -> None:
        target = self.root / str(name)
        if not target.exists():
            return
        try:
            verify_checkpoint(target)
        except CheckpointError as error:
            log.warning("checkpoint set aside: %s", error.message)
            self._set_aside(target, "damaged")
            return
        raise CheckpointError(
            f"{target} is committed already and complete; it was not overwritten",
            "a run that goes back to an older step sets the later checkpoints aside first",
        )

    def set_aside_after(self, global_step: int, telling: Telling = NOBODY) -> tuple[Path, ...]:
        """Take every checkpoint of a later step out of the list, without deleting it; -1 for all of them: the steps
        after `global_step` are trained again and bring checkpoints of the same names. Returns where they lie now,
        `telling` it before each is moved. Raises CheckpointError where a folder can't be moved."""
        return self._set_aside_after(global_step, "superseded", telling)

    def condemn_after(self, global_step: int, telling: Telling = NOBODY) -> tuple[Path, ...]:
        """The same for checkpoints that hold damage: nothing restores them, nothing prunes them, a person may look."""
        return self._set_aside_after(global_step, "condemned", telling)

    def reinstate(self, global_step: int, names: Sequence[str]) -> tuple[Path, ...]:
        """Put back those of `names` that are of later steps, in place of what was committed since. Raises
        CheckpointError where a folder can't be moved; may be begun again."""
        aside = self.root / SET_ASIDE
        found = [(aside / name, CheckpointName.parse(name.partition(".")[0])) for name in names]
        later = [(path, name) for path, name in found if name and name.global_step > global_step and path.is_dir()]
        put_back = []
        try:
            for path, name in later:
                if (self.root / str(name)).exists():
                    self._set_aside(self.root / str(name), "superseded")
                put_back.append(path.rename(self.root / str(name)))
            if later:
                sync_folder(self.root)
        except OSError as error:
            raise self._not_written(aside, error) from error
        return tuple(put_back)

    def _set_aside_after(self, global_step: int, why: str, telling: Telling = NOBODY) -> tuple[Path, ...]:
        later = [checkpoint.path for checkpoint in self.list() if checkpoint.global_step > global_step]
        moved = []
        for path in reversed(later):
            try:
                moved.append(self._set_aside(path, why, telling))
            except OSError as error:
                if path.exists():
                    raise self._not_written(self.root / SET_ASIDE, error) from error
                # a Coordinator that took over condemns while the trainer still goes back: it has put it aside meanwhile
        return tuple(moved)

    def _set_aside(self, path: Path, why: str, telling: Telling = NOBODY) -> Path:
        aside = self.root / SET_ASIDE
        make_folder(aside)
        names = (aside / f"{path.name}.{why}-{number}" for number in itertools.count(1))
        telling(target := next(name for name in names if not name.exists()))
        path.rename(target)
        sync_folder(aside)
        sync_folder(self.root)
        self._verified.discard(path)
        return target

    # ── reading ──

    def list(self) -> tuple[Checkpoint, ...]:
        """All checkpoints, the newest last, as their manifests describe them. Empty where there is no folder yet.

        Damaged ones and AReaL's own are listed too, with their `state` and `problem`. Raises CheckpointError where the
        folder can't be read.
        """
        return list_folder(self.root)

    def find(self, global_step: int) -> Checkpoint | None:
        """The committed checkpoint of a step, as listed."""
        found = [c for c in self.list() if c.global_step == global_step and c.state is CheckpointState.COMMITTED]
        return found[-1] if found else None

    def verify(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Check all files against the manifest; returns unlisted extra files. Raises CheckpointError with the fault."""
        self._verified.discard(checkpoint.path)
        extra = verify_checkpoint(checkpoint.path)
        self._verified.add(checkpoint.path)
        return extra

    def latest_complete(self) -> NewestComplete:
        """The newest that is verified complete now, and why newer ones were passed over. Raises DiskError."""
        skipped: list[str] = []
        for checkpoint in reversed(self.list()):
            try:
                self.verify(checkpoint)
            except CheckpointError as error:
                refuse_unread(checkpoint.path)
                skipped.append(error.message)
            else:
                return NewestComplete(checkpoint=checkpoint, skipped=tuple(skipped))
        return NewestComplete(checkpoint=None, skipped=tuple(skipped))

    # ── removing ──

    def prune(self, keep_last: int, *, spare: Set[int] = frozenset()) -> tuple[Checkpoint, ...]:
        """Remove all but the `keep_last` newest, those committed with `keep` and the steps in `spare`; returns what
        was removed. One that can't be removed is logged and stays.

        Nothing is removed unless the newest of them was verified in this process. Those set aside by a restore
        are thinned in the same way; damaged ones are left for a person. Raises CheckpointError.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last} would remove every checkpoint")
        surplus = (*self._surplus(keep_last, spare), *_surplus_aside(self.root / SET_ASIDE, keep_last))
        removed = tuple(checkpoint for checkpoint in surplus if self._is_out_of_the_way(checkpoint))
        try:
            if removed:
                sync_folder(self.root)
            self.clean()
        except OSError as error:
            raise DiskError(f"old checkpoints in {self.root} can't be removed: {error}", "look at its disk") from error
        return removed

    def _is_out_of_the_way(self, checkpoint: Checkpoint) -> bool:
        try:
            checkpoint.path.rename(self.root / f"{TRASH}{checkpoint.name}-{secrets.token_hex(4)}")
        except OSError as error:
            log.warning("an old checkpoint stays, it can't be removed: %s: %s", checkpoint.path, error)
            return False
        return True

    def _surplus(self, keep_last: int, spare: Set[int]) -> tuple[Checkpoint, ...]:
        retained = 0
        surplus = []
        for checkpoint in reversed(self.list()):
            if checkpoint.state is not CheckpointState.COMMITTED:
                continue
            if retained < keep_last:
                retained += self._is_safe(checkpoint, thorough=not retained)
            elif not checkpoint.keep and checkpoint.global_step not in spare:
                surplus.append(checkpoint)
        return tuple(surplus)

    def _is_safe(self, checkpoint: Checkpoint, *, thorough: bool) -> bool:
        try:
            if thorough and checkpoint.path not in self._verified:
                self.verify(checkpoint)
            else:
                check_checkpoint_sizes(checkpoint.path)
        except CheckpointError as error:
            log.warning("not counted as a checkpoint to keep: %s", error.message)
            return False
        return True

    def clean(self) -> tuple[str, ...]:
        """Remove what a crash left staged or half deleted; returns the names. Only the run's writer may call it.

        What can't be removed is logged and stays: no checkpoint was ever saved again for one such folder.
        """
        if not self.root.is_dir():
            return ()
        leftovers = [
            path
            for path in self.root.iterdir()
            if path.name.startswith((STAGING, TRASH)) and path not in self._staged and path.is_dir()
        ]
        return tuple(path.name for path in leftovers if _is_removed(path))

    def _not_written(self, what: object, error: Exception) -> CheckpointError:
        hint = "the last committed checkpoint is intact; check the folder's permissions and its disk"
        if getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or _free_bytes(self.root) < 2**20:
            hint = "its disk is full or out of inodes: make room, or lower recover.keep_last; older ones are intact"
        kind = DiskError if isinstance(error, OSError) else CheckpointError
        return kind(f"checkpoint {what} was not written to {self.root}: {error}", hint)


def _synced(staged: Path, files: Mapping[str, FileRecord]) -> Mapping[str, FileRecord]:
    for name in files:
        sync_file(staged / name)
    return files


def _seal(staged: Path, manifest: Manifest, *, keep: bool) -> None:
    """Write the manifest last, and sync everything that the rename will make visible."""
    if keep:
        (staged / KEEP_MARK).touch()
        sync_file(staged / KEEP_MARK)
    (staged / MANIFEST_NAME).write_bytes(manifest.encode())
    sync_file(staged / MANIFEST_NAME)
    for folder in (*(path for path in staged.rglob("*") if path.is_dir()), staged):
        sync_folder(folder)


def _is_removed(path: Path) -> bool:
    """Of a link, by which a person moved a checkpoint to another disk, the link alone."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        log.warning("a deleted checkpoint's folder stays, it can't be removed: %s: %s", path, error)
        return False
    return True


def _surplus_aside(aside: Path, keep_last: int) -> list[Checkpoint]:
    superseded = [c for c in list_folder(aside) if ".superseded-" in c.path.name and c.manifest is not None]
    superseded.sort(key=lambda checkpoint: checkpoint.manifest.created_at if checkpoint.manifest else 0.0)
    return [checkpoint for checkpoint in superseded[:-keep_last] if not checkpoint.keep]


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # not there yet: the error itself says enough
        return 2**63
