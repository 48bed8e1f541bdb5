"""The restore that an operator set up for the next launch (recover_checkpoint/), and how the launch applies it.

    setup_recovery: .recovery-<id>/ (links, record) ─► verified ─► exchanged with recover_checkpoint/   undo: back again
    next launch:    verified, settings compared ─► later checkpoints aside, memory dropped ─► in the store ─► removed

`recovery.json` is the first file of a staged folder and names it by its id. So what a kill leaves can be identified:
a folder under its own id was never put in place, or was undone; one under another's id is what that one replaced.
A launch can apply it again from the beginning until the folder is removed, which is the last action: no step is
trained before, and a second launch must not go back once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.durable import replace_file, sync_folder
from launcher.base.errors import CheckpointError, ConfigError, StorageError
from launcher.base.folder_swap import copy_folder, exchange, put_in_place
from launcher.checkpoints.checkpoint_folder import Checkpoint, CheckpointName, verify_checkpoint
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.checkpoints.manifest import POSITION_FILE, Manifest
from launcher.checkpoints.verification import Identity, verify
from launcher.config.fingerprint import config_fingerprint, fingerprint_differences
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal, encode
from launcher.run_files.run_order import TAKEN
from launcher.run_files.run_paths import RunPaths

RECORD = "recovery.json"
FORMAT = "grpo-recovery/1"
STAGED = ".recovery-"
KEPT_UNDOS = 3
"""That can be undone one after another; older ones would only keep their files from being freed."""
GONE = ".gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRecord:
    """The content of recovery.json. `first_damaged`: checkpoints from this step on hold damage; None: none is known."""

    id: str
    prepared_at: float
    source: str
    global_step: int
    how: str = ""
    forced: str = ""
    first_damaged: int | None = None
    format: str = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRestore:
    """A recover_checkpoint/ that was verified complete. `record`: None where somebody else put it there."""

    folder: Path
    name: CheckpointName
    manifest: Manifest
    record: RestoreRecord | None


# ── what setup_recovery does ──


def prepare(
    paths: RunPaths, source: Checkpoint, *, forced: str = "", first_damaged: int | None = None
) -> RestoreRecord:
    """Put a verified copy of `source` at recover_checkpoint/. Raises CheckpointError, with all as it was before."""
    record = RestoreRecord(
        id=secrets.token_hex(6),
        prepared_at=time.time(),
        source=str(source.path),
        global_step=source.global_step,
        forced=forced,
        first_damaged=first_damaged,
    )
    clean(paths)
    staged = paths.checkpoints / f"{STAGED}{record.id}"
    try:
        staged.mkdir()
        replace_file(staged / RECORD, encode(dataclasses.asdict(record)))
        how = copy_folder(source.path, staged, without=(RECORD,))
        record = dataclasses.replace(record, how=how)
        replace_file(staged / RECORD, encode(dataclasses.asdict(record)))
        _prove(paths, staged, source.name)
        put_in_place(staged, paths.recover_checkpoint)
        _forget_old(paths, record)
    except OSError as error:
        raise CheckpointError(
            f"{paths.recover_checkpoint} was not prepared: {error}", "is there room, may we write there?"
        ) from error
    finally:
        if is_own(staged):  # not put in place; what it replaced has another's id, and stays for an undo
            with contextlib.suppress(OSError):
                _discard(staged)
    return record


def _prove(paths: RunPaths, staged: Path, name: CheckpointName) -> None:
    mine = Identity(experiment_name=paths.experiment_name, trial_name=paths.trial_name)
    found = verify(staged, name=name, identity=mine)
    if not found.is_complete:
        raise CheckpointError(f"the copy is not complete: {found.why_not}", "choose an older checkpoint")


def _forget_old(paths: RunPaths, newest: RestoreRecord) -> None:
    """What was replaced longer ago; what somebody else had put there is kept however old."""
    record: RestoreRecord | None = newest
    kept: list[Path] = []
    while record is not None and len(kept) < KEPT_UNDOS:
        kept.append(paths.checkpoints / f"{STAGED}{record.id}")
        record = read_record(kept[-1])
    for folder in paths.checkpoints.glob(f"{STAGED}*"):
        if folder not in kept and read_record(folder) is not None:
            _discard(folder)


def undo(paths: RunPaths) -> str:
    """Undo the last `prepare`; returns what is there now. Raises StorageError where there is nothing to undo."""
    clean(paths)
    place = paths.recover_checkpoint
    if not place.is_dir():
        raise StorageError(
            f"there is no {place}: nothing is prepared", "one that a launch has used is undone by preparing another"
        )
    record = read_record(place)
    if record is None:
        raise StorageError(
            f"{place} has no {RECORD}: it was not made by setup_recovery", "remove it manually if it must go"
        )
    before = paths.checkpoints / f"{STAGED}{record.id}"
    if before.is_dir():
        exchange(before, place)
        left = f"{place} holds again what it held before"
    else:
        place.rename(before)
        left = f"{place} is gone, as before"
    sync_folder(paths.checkpoints)
    clean(paths)
    return left


def clean(paths: RunPaths) -> None:
    """Remove what was staged and never put in place, or undone. What was replaced stays, with its successor."""
    is_prepared = paths.recover_checkpoint.is_dir()
    if paths.checkpoints.is_dir():
        for folder in paths.checkpoints.glob(f"{STAGED}*"):
            if not is_prepared or is_own(folder):
                _discard(folder)


def _discard(folder: Path) -> None:
    """Out of the way at once, then file by file: half removed it would have lost its id; of a link the link alone.
    Raises OSError."""
    if folder.is_symlink():
        folder.unlink()
        return
    gone = folder.with_name(f"{STAGED}{secrets.token_hex(6)}{GONE}")
    folder.rename(gone)
    sync_folder(gone.parent)
    shutil.rmtree(gone)


def is_own(folder: Path) -> bool:
    """Is it under its own id, without any content yet, or being removed?"""
    if not folder.is_dir():
        return False
    if folder.name.endswith(GONE):
        return True
    record = read_record(folder)
    if record is None:
        return not any(path.name != RECORD for path in folder.iterdir() if not path.name.startswith(f".{RECORD}"))
    return folder.name == f"{STAGED}{record.id}"


def read_record(folder: Path) -> RestoreRecord | None:
    """None where there is none that can be read."""
    try:
        data = json.loads((folder / RECORD).read_bytes())
        return RestoreRecord(**data) if data["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ── what a launch does ──


def find_prepared(config: RunConfig, paths: RunPaths, *, any_settings: bool = False) -> PendingRestore | None:
    """What is prepared for this launch; None: nothing. Raises ConfigError where it can't be used, changing nothing."""
    folder = paths.recover_checkpoint
    if not folder.is_dir():
        return None
    hint = "set it up again, or take it back: python -m scripts.setup_recovery --undo"
    if config.recover.mode == "off":
        raise ConfigError(
            f"recover.mode=off, but {folder} is prepared to be resumed from",
            "resume with recover.mode=auto, or give the new run another trial_name",
        )
    try:
        verify_checkpoint(folder)
        manifest = Manifest.read(folder)
        name = _name_of(folder, manifest)
    except CheckpointError as error:
        raise ConfigError(
            f"{folder} is prepared to be resumed from, and not complete: {error.message}", hint
        ) from error
    differences = fingerprint_differences(manifest.config_fingerprint, config_fingerprint(config))
    if differences and not any_settings:
        raise ConfigError(
            f"{folder} was made with other settings: " + "; ".join(map(str, differences)), f"set them back; or {hint}"
        )
    return PendingRestore(folder=folder, name=name, manifest=manifest, record=read_record(folder))


def _name_of(folder: Path, manifest: Manifest) -> CheckpointName:
    """As the position in it says; a copy has lost its folder's name. Raises CheckpointError."""
    path = folder / POSITION_FILE
    try:
        position: Mapping[str, Any] = json.loads(path.read_bytes())["position"]
        name = CheckpointName(
            epoch=int(position["last_epoch"]),
            epoch_step=int(position["last_epoch_step"]),
            global_step=int(position["next_step"]) - 1,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}") from error
    if name.global_step != manifest.global_step:
        raise CheckpointError(f"{path} is of step {name.global_step}, its manifest of step {manifest.global_step}")
    return name


def take(prepared: PendingRestore, paths: RunPaths, journal: Journal) -> Checkpoint:
    """Make it the newest checkpoint of the run, and the only thing there is to resume from. Raises CheckpointError."""
    store, step = CheckpointStore(paths.default_checkpoints), prepared.name.global_step
    InMemoryCheckpoints(paths).drop_after(step - 1)  # a state of this very step may be of another branch
    record = prepared.record
    aside: list[Path] = []
    if record is not None and record.first_damaged is not None:
        aside += store.condemn_after(max(step, record.first_damaged - 1))
    aside += store.set_aside_after(step)
    checkpoint = _same(store, prepared) or _put_into(store, prepared, aside)
    journal.record(
        TAKEN,
        subject=str(prepared.name),
        reason=f"prepared from {record.source}" if record is not None else f"found in {prepared.folder}",
        global_step=step,
        set_aside=[path.name for path in aside],
    )
    _remove(paths)
    return checkpoint


def _same(store: CheckpointStore, prepared: PendingRestore) -> Checkpoint | None:
    """The store's own of that step, where it is complete and has the same files."""
    found = store.find(prepared.name.global_step)
    if found is None or found.manifest is None or found.manifest.files != prepared.manifest.files:
        return None
    try:
        store.verify(found)
    except CheckpointError:
        return None
    return found


def _put_into(store: CheckpointStore, prepared: PendingRestore, aside: list[Path]) -> Checkpoint:
    manifest, name = prepared.manifest, prepared.name
    aside += store.set_aside_after(name.global_step - 1)
    with store.staging(name) as staged:
        copy_folder(prepared.folder, staged, without=(RECORD, "manifest.json"))
        return store.commit(
            staged,
            global_step=name.global_step,
            policy_version=manifest.policy_version,
            config_fingerprint=manifest.config_fingerprint,
            health=manifest.health,
            keep=False,
        )


def _remove(paths: RunPaths) -> None:
    """Its last act: first out of the way at once, then file by file; with it all that earlier ones replaced."""
    try:
        _discard(paths.recover_checkpoint)
    except OSError as error:
        raise CheckpointError(
            f"{paths.recover_checkpoint} can't be removed: {error}", "else each launch would go back to it: remove it"
        ) from error
    for folder in paths.checkpoints.glob(f"{STAGED}*"):
        shutil.rmtree(folder, ignore_errors=True)
