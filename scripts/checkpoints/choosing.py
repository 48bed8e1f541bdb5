"""Which checkpoint an operator gets: the newest that fits, proven; and why not, where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import CheckpointError, StorageError
from launcher.checkpoints.checkpoint_catalog import CatalogEntry, CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import CheckpointName, read_checkpoint
from launcher.policy.checkpoint_status import CheckpointStatus
from launcher.run_files.run_paths import names_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`passed_over`: newer ones that fit as well and are not whole, each with why. `forced`: what was overridden."""

    entry: CatalogEntry
    passed_over: tuple[str, ...] = ()
    forced: str = ""


def choose(
    shelf: CheckpointCatalog,
    *,
    before_step: int | None = None,
    path: Path | None = None,
    good: bool = False,
    force: bool = False,
) -> Chosen:
    """Exactly one of the three says which. Raises CheckpointError, StorageError: nothing fits, with the reason."""
    if path is not None:
        return _this_one(shelf, path, force)
    passed_over: list[str] = []
    for entry in _candidates(shelf, before_step, good, force):
        proven = _proven(shelf, entry)
        if not proven.problem:
            return Chosen(entry=proven, passed_over=tuple(passed_over), forced=_forced(shelf, proven))
        passed_over.append(f"step {entry.global_step}: {proven.problem}")
    why = _why_none(shelf, before_step, good, passed_over)
    raise CheckpointError(
        f"no checkpoint of {shelf.trial.name} {_asked(before_step, good)}: {why}",
        f"see them all: python -m scripts.list_checkpoints {names_of(shelf.trial.paths)} --verify",
    )


def _candidates(shelf: CheckpointCatalog, before_step: int | None, good: bool, force: bool) -> Iterator[CatalogEntry]:
    """The newest first; what the run set aside only by its path."""
    for entry in reversed(shelf.entries):
        is_early = before_step is None or entry.global_step < before_step
        standing = shelf.would_be(entry)
        is_condemned = standing is CheckpointStatus.CONDEMNED
        if (
            not entry.set_aside_as
            and is_early
            and (not is_condemned or force)
            and (not good or standing is CheckpointStatus.GOOD)
        ):
            yield entry


def _proven(shelf: CheckpointCatalog, entry: CatalogEntry) -> CatalogEntry:
    """Whole, and of a kind that its launcher can go on from."""
    proven = shelf.proven(entry)
    if shelf.trial.is_ours and not proven.problem and proven.checkpoint.manifest is None:
        why = f"{entry.path} has no manifest: an export, without optimizer and data position; nothing can go on from it"
        return dataclasses.replace(proven, problem=why)
    return proven


def _this_one(shelf: CheckpointCatalog, path: Path, force: bool) -> Chosen:
    entry = _proven(shelf, _entry_at(shelf, path))
    if entry.problem:
        raise CheckpointError(f"it is not whole: {entry.problem}", "a torn checkpoint is never set up; choose another")
    forced = _forced(shelf, entry)
    if forced and not force:
        raise CheckpointError(
            f"{entry.path} holds damage: {forced}", "choose one from before it, or, if you know better, add --force"
        )
    return Chosen(entry=entry, forced=forced)


def _entry_at(shelf: CheckpointCatalog, path: Path) -> CatalogEntry:
    """Raises StorageError where it is no folder of a checkpoint."""
    folder = path.expanduser().absolute()
    for entry in shelf.entries:
        if entry.path.resolve() == folder.resolve():
            return entry
    if not folder.is_dir():
        there = ", ".join(entry.path.name for entry in shelf.entries[-6:]) or "none"
        raise StorageError(f"there is no folder {folder}", f"the newest of {shelf.trial.default}: {there}")
    name = CheckpointName.parse(folder.name.partition(".")[0])
    if name is None:
        raise StorageError(
            f"{folder.name} is no checkpoint's name, so its step is not known",
            "a checkpoint's folder is called epoch<e>epochstep<s>globalstep<g>",
        )
    return shelf.entry_of(read_checkpoint(folder, name))


def _forced(shelf: CheckpointCatalog, entry: CatalogEntry) -> str:
    """What speaks against an entry that is whole; "" where nothing does."""
    return entry.reason if shelf.would_be(entry) is CheckpointStatus.CONDEMNED else ""


def _asked(before_step: int | None, good: bool) -> str:
    words = ["that is good"] if good else []
    return " and ".join([*words, *([f"of a step before {before_step}"] if before_step is not None else [])])


def _why_none(shelf: CheckpointCatalog, before_step: int | None, good: bool, passed_over: list[str]) -> str:
    if passed_over:
        return "; ".join(passed_over)
    if not shelf.entries:
        return f"there is none at all in {shelf.trial.default}"
    fitting = [entry for entry in shelf.entries if before_step is None or entry.global_step < before_step]
    if not fitting:
        return f"the oldest is of step {shelf.entries[0].global_step}"
    if shelf.past.last_step < 0 and good:
        return f"no rewards are known, {shelf.trial.logs} does not tell what followed any of them; name one yourself"
    return "; ".join(f"step {entry.global_step} is {_told(shelf, entry)}" for entry in fitting[-4:])


def _told(shelf: CheckpointCatalog, entry: CatalogEntry) -> str:
    judged = shelf.judged(entry)
    return f"{judged.standing} ({entry.problem or judged.reason})"
