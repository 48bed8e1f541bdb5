"""Chooses the checkpoint for an operator: the newest that fits, verified; or explains why there is none."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import CheckpointError, DataError, StorageError
from launcher.base.own_python import python
from launcher.checkpoints.checkpoint_catalog import CatalogEntry, CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import CheckpointName, read_checkpoint
from launcher.checkpoints.health_evidence import HealthEvidence, SeenSteps
from launcher.checkpoints.recorded_health import read_health
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.diagnosis.judging.step_history import evidence_of, falls_of, passes_of
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.diagnosis.reading.log_file import role_of_name
from launcher.diagnosis.reading.log_records import Contents, Role
from launcher.policy.checkpoint_status import CheckpointStatus
from launcher.run_files.run_paths import names_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for: the newest that is complete, of a step before `before_step`, that is `good`; or the one at
    `path`. `force`: also one that holds damage."""

    before_step: int | None = None
    good: bool = False
    path: Path | None = None
    force: bool = False

    def __str__(self) -> str:
        before = "" if self.before_step is None else f"of a step before {self.before_step}"
        return " and ".join(filter(None, ["that is good" if self.good else "", before]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`passed_over`: newer ones that fit as well and are not complete, each with why. `forced`: what was overridden."""

    entry: CatalogEntry
    passed_over: tuple[str, ...] = ()
    forced: str = ""


def read_catalog(trial: TrialFolder) -> CheckpointCatalog:
    """With the health as its files show it: ours by the journal, AReaL's by whatever in its logs holds steps."""
    if trial.is_ours:
        return CheckpointCatalog(trial, read_health(trial.paths))
    try:
        files = [one for one in find_inputs([trial.logs]) if role_of_name(one.path.name) is not Role.SERVER]
        contents = read_inputs(files) if files else Contents(sources=())
    except (DataError, StorageError) as error:
        return CheckpointCatalog(trial, HealthEvidence(seen=SeenSteps(unread=(error.message,))))
    passes = passes_of(contents.steps)
    return CheckpointCatalog(trial, evidence_of(contents, falls_of(contents.steps, passes), passes))


def choose(catalog: CheckpointCatalog, wanted: Wanted) -> Chosen | None:
    """None: AReaL's own recover folder fits, has its optimizer, and is no older than the newest export that does.

    Raises CheckpointError, StorageError: nothing fits, with the reason.
    """
    if wanted.path is not None:
        return _at_path(catalog, wanted.path, wanted.force)
    try:
        chosen = _newest(catalog, wanted)
    except CheckpointError:
        if _recover_folder_fits(catalog, wanted, oldest=0):
            return None
        raise
    return None if _recover_folder_fits(catalog, wanted, oldest=chosen.entry.global_step) else chosen


def _newest(catalog: CheckpointCatalog, wanted: Wanted) -> Chosen:
    passed_over: list[str] = []
    for candidate in catalog.newest_first(before_step=wanted.before_step, good=wanted.good, condemned=wanted.force):
        entry = _verified(catalog, candidate)
        if not entry.problem:
            return Chosen(entry=entry, passed_over=tuple(passed_over), forced=_forced(catalog, entry))
        passed_over.append(f"step {entry.global_step}: {entry.problem}")
    why = "; ".join(passed_over) or _why_none(catalog, wanted)
    raise CheckpointError(
        f"no checkpoint of {catalog.trial.name} {wanted}: {why}",
        f"see them all: {python()} -m scripts.list_checkpoints {names_of(catalog.trial.paths)} --verify",
    )


def _recover_folder_fits(catalog: CheckpointCatalog, wanted: Wanted, *, oldest: int) -> bool:
    info = catalog.recover_info
    if info is None or info.name is None or info.problems or not info.has_optimizer:
        return False
    step = info.name.global_step
    status = catalog.health.status_of(step).status
    if status is CheckpointStatus.CONDEMNED or (wanted.good and status is not CheckpointStatus.GOOD):
        return False
    return step >= oldest and (wanted.before_step is None or step < wanted.before_step)


def _verified(catalog: CheckpointCatalog, entry: CatalogEntry) -> CatalogEntry:
    """Complete, and of a kind that its launcher can resume from."""
    found = catalog.verified(entry)
    if catalog.trial.is_ours and not found.problem and not found.has_optimizer:
        why = f"{entry.path} has no manifest: an export, without optimizer and data position; no run resumes from it"
        return dataclasses.replace(found, problem=why)
    return found


def _at_path(catalog: CheckpointCatalog, path: Path, force: bool) -> Chosen:
    entry = _verified(catalog, _entry_at(catalog, path))
    if entry.problem:
        raise CheckpointError(
            f"it is not complete: {entry.problem}", "a torn checkpoint is never set up; choose another"
        )
    forced = _forced(catalog, entry)
    if forced and not force:
        raise CheckpointError(
            f"{entry.path} holds damage: {forced}", "choose one from before it, or, if you know better, add --force"
        )
    return Chosen(entry=entry, forced=forced)


def _entry_at(catalog: CheckpointCatalog, path: Path) -> CatalogEntry:
    """Raises StorageError where it is no folder of a checkpoint."""
    folder = path.expanduser().absolute()
    for entry in catalog.entries:
        if entry.path.resolve() == folder.resolve():
            return entry
    if not folder.is_dir():
        there = ", ".join(entry.path.name for entry in catalog.entries[-6:]) or "none"
        raise StorageError(f"there is no folder {folder}", f"the newest of {catalog.trial.default}: {there}")
    name = CheckpointName.parse(folder.name.partition(".")[0])
    if name is None:
        raise StorageError(
            f"{folder.name} is no checkpoint's name, so its step is not known",
            "a checkpoint's folder is called epoch<e>epochstep<s>globalstep<g>",
        )
    return catalog.entry_of(read_checkpoint(folder, name))


def _forced(catalog: CheckpointCatalog, entry: CatalogEntry) -> str:
    """What speaks against an entry that is complete; "" where nothing does."""
    return entry.reason if catalog.presumed(entry).status is CheckpointStatus.CONDEMNED else ""


def _why_none(catalog: CheckpointCatalog, wanted: Wanted) -> str:
    if not catalog.entries:
        return f"there is none at all in {catalog.trial.default}"
    before = wanted.before_step
    fitting = [entry for entry in catalog.entries if before is None or entry.global_step < before]
    if not fitting:
        return f"the oldest is of step {catalog.entries[0].global_step}"
    if catalog.health.not_known and wanted.good:
        return f"{catalog.health.not_known}; name one yourself"
    found = [catalog.presumed(entry) for entry in fitting[-4:]]
    return "; ".join(f"step {one.global_step} is {one.status} ({one.problem or one.reason})" for one in found)
