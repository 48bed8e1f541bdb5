"""Makes of an older AReaL export what AReaL's resume (1.0.4) loads: recover_info/ and default/recover_checkpoint/.

    .{trial}.recovery-<id>/   recovery.json {phase: staging → ready → undoing}
        recover_info/ recover_checkpoint/   what is to be put in place
        before/recover_info, recover_checkpoint   what was there

Two folders can't be exchanged at once. AReaL must never meet the weights of one step with the counters of another, so
recover_info/ goes first and comes last: in between it finds nothing to resume from. What a kill leaves half done is
finished, from what lies where, before anything else is done. The folder lies beside the trial's, since AReaL makes
a recover_checkpoint/ in every folder that it finds within.

Never by hard links: AReaL overwrites its recover folder in place, which would change the other name's bytes too.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.durable import replace_file, sync_file, sync_folder
from launcher.base.errors import CheckpointError, StorageError
from launcher.checkpoints.areal_folders import DATA_FILE, FREQUENCY_FILES, METADATA, pickle_problems, read_recover_info
from launcher.checkpoints.areal_log import launch_command, read_steps_per_epoch
from launcher.checkpoints.checkpoint_catalog import CatalogEntry, CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import CheckpointName
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.run_files.journal import encode
from scripts.checkpoints.dcp import write_dcp

RECORD = "recovery.json"
FORMAT = "grpo-areal-recovery/1"
INFO, CHECKPOINT, BEFORE = "recover_info", "recover_checkpoint", "before"
STAGING, READY, UNDOING = "staging", "ready", "undoing"
NO_OPTIMIZER = "recover.no_load_optim=true"
BEFORE_1_0 = "python3 -m areal.launcher."
BEGIN_AT_WEIGHTS = "begin at these weights instead: actor.path=<the export>, and another trial_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArealRecord:
    """`info`: where recover_info belongs. `data_step`: of the step whose data position was copied."""

    id: str
    phase: str
    prepared_at: float
    source: str
    global_step: int
    data_step: int
    info: str
    checkpoint: str
    forced: str = ""
    format: str = FORMAT


def prepare(catalog: CheckpointCatalog, entry: CatalogEntry, *, forced: str = "") -> ArealRecord:
    """Raises CheckpointError where AReaL could not resume from it, with all as it was before."""
    trial = catalog.trial
    finish(trial)
    _refuse_other_forms(trial)
    data = _data_file(catalog)
    target = trial.recover_info or trial.root / INFO
    record = ArealRecord(
        id=secrets.token_hex(6),
        phase=STAGING,
        prepared_at=time.time(),
        source=str(entry.path),
        global_step=entry.global_step,
        data_step=_data_step(catalog),
        info=str(target),
        checkpoint=str(trial.areal_checkpoint),
        forced=forced,
    )
    folder = trial.root.parent / f"{_prefix(trial)}{record.id}"
    try:
        (folder / INFO).mkdir(parents=True)
        (folder / BEFORE).mkdir()
        _write(folder, record)
        write_dcp(entry.path, folder / CHECKPOINT)
        _write_info(folder / INFO, entry.checkpoint.name, _steps_per_epoch(catalog, entry), data)
        made = read_recover_info(folder / INFO, folder / CHECKPOINT)
        if made.problems or made.name != entry.checkpoint.name:
            raise CheckpointError(f"what was made could not be resumed from: {'; '.join(made.problems)}")
        for earlier, one in _records(trial):  # what AReaL itself wrote comes back first: it is what an undo gives back
            if one.phase == READY and _step_in_place(one) == one.global_step:
                _take_back(earlier, one)
        record = dataclasses.replace(record, phase=READY)
        _write(folder, record)  # from here on it is carried through, by this call or by the next
    except OSError as error:
        raise CheckpointError(f"nothing was prepared: {error}", "is there room, may we write there?") from error
    finally:
        if (there := read_areal_record(folder)) is None or there.phase == STAGING:
            shutil.rmtree(folder, ignore_errors=True)
    _carry_through(folder, record)
    return record


def _prefix(trial: TrialFolder) -> str:
    return f".{trial.paths.trial_name}.recovery-"


# ── what is written ──


def _refuse_other_forms(trial: TrialFolder) -> None:
    """Of what this run's AReaL wrote last, and of how it was started, is seen what it will read."""
    if launch_command(trial.logs).startswith(BEFORE_1_0):
        raise CheckpointError(
            f"{trial.logs} is of an AReaL before 1.0, which loads an optimizer in each resume; an export has none",
            BEGIN_AT_WEIGHTS,
        )
    if (trial.areal_checkpoint / "config.json").exists() and not (trial.areal_checkpoint / METADATA).exists():
        raise CheckpointError(
            f"{trial.areal_checkpoint} is a Hugging Face folder, as AReaL before 1.0 recovers from; only 1.0's is made",
            BEGIN_AT_WEIGHTS,
        )
    if (mark := trial.areal_checkpoint / "common.pt").exists():
        raise CheckpointError(
            f"{mark}: this run's recover folder is Megatron's, whose form only Megatron can write", BEGIN_AT_WEIGHTS
        )


def _data_file(catalog: CheckpointCatalog) -> Path:
    folder = catalog.trial.recover_info
    if folder is None:
        raise CheckpointError(
            f"{catalog.trial.root} has no recover_info: AReaL can't resume without {DATA_FILE}, and none can be made",
            BEGIN_AT_WEIGHTS,
        )
    if problems := pickle_problems(folder / DATA_FILE):
        raise CheckpointError(f"AReaL could not resume: {problems[0]}; nothing can make another", BEGIN_AT_WEIGHTS)
    return folder / DATA_FILE


def _data_step(catalog: CheckpointCatalog) -> int:
    """Of the existing pickle; one that was set up before is of an older set-up's own step."""
    info = catalog.recover_info
    now = -1 if info is None or info.name is None else info.name.global_step
    made = [record for _, record in _records(catalog.trial) if record.global_step == now]
    return max(made, key=lambda record: record.prepared_at).data_step if made else now


def _records(trial: TrialFolder) -> list[tuple[Path, ArealRecord]]:
    folders = trial.root.parent.glob(f"{_prefix(trial)}*")
    return [(folder, record) for folder in folders if (record := read_areal_record(folder)) is not None]


def _steps_per_epoch(catalog: CheckpointCatalog, entry: CatalogEntry) -> int:
    if catalog.recover_info is not None and catalog.recover_info.steps_per_epoch:
        return catalog.recover_info.steps_per_epoch
    names = [one.checkpoint.name for one in (entry, *catalog.entries)]
    for name in names:  # global_step = epoch * steps_per_epoch + epoch_step
        if name.epoch > 0:
            return (name.global_step - name.epoch_step) // name.epoch
    found = read_steps_per_epoch(catalog.trial.logs)
    if found is None:
        raise CheckpointError(
            f"how many steps an epoch has is not known: neither {catalog.trial.logs} nor a later epoch says it",
            "put the trainer.log there, or begin at these weights: actor.path=<the export>, another trial_name",
        )
    return found


def _write_info(folder: Path, name: CheckpointName, steps_per_epoch: int, data: Path) -> None:
    step = dataclasses.asdict(name) | {"steps_per_epoch": steps_per_epoch}
    epochs = name.epoch + (name.epoch_step == steps_per_epoch - 1)
    for file in FREQUENCY_FILES:
        try:
            before = json.loads((data.parent / file).read_bytes())
            counted = _counted_to(before, steps=name.global_step + 1, epochs=epochs)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{data.parent / file} can't be used: {error!r}") from error
        _write_json(folder / file, counted)
    _write_json(folder / "stats_logger_info.json", {"last_commit_step": name.global_step - 1})
    shutil.copy2(data, folder / DATA_FILE)
    sync_file(folder / DATA_FILE)
    _write_json(folder / "step_info.json", step)  # AReaL writes it after the checkpoint, and so it is dated
    sync_folder(folder)


def _counted_to(before: Mapping[str, Any], *, steps: int, epochs: int) -> dict[str, object]:
    """The counters of what is due when, as they were after so many steps and complete epochs."""
    counts = {"epoch": epochs, "step": steps, "time": steps}
    made: dict[str, object] = {}
    for part, count in counts.items():
        every = before[part]["frequency_steps"]
        last = count - count % every if every else min(before[part]["last_steps"], count)
        made[part] = before[part] | {"steps": count, "last_steps": last, "interval_steps": count - last}
    return made


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    replace_file(file, json.dumps(content, indent=4).encode())


# ── into its place, and back ──


def finish(trial: TrialFolder) -> None:
    """Carry through, or remove, what a kill left half done. Raises CheckpointError."""
    for folder in sorted(trial.root.parent.glob(f"{_prefix(trial)}*")):
        record = read_areal_record(folder)
        if record is None or record.phase == STAGING:
            shutil.rmtree(folder)
        else:
            _carry_through(folder, record)


def _carry_through(folder: Path, record: ArealRecord) -> None:
    """Into its place, or back. Each rename is done or not; the places of the files show how far it is."""
    info, checkpoint, before = Path(record.info), Path(record.checkpoint), folder / BEFORE
    try:
        if record.phase == READY:
            if (folder / CHECKPOINT).exists():
                _move(info, before / INFO)
                _move(checkpoint, before / CHECKPOINT)
                _move(folder / CHECKPOINT, checkpoint)
            _move(folder / INFO, info)
            return
        if not (folder / "done").exists():
            _move(info, folder / INFO)
            _move(checkpoint, folder / CHECKPOINT)
            (folder / "done").touch()
        _move(before / CHECKPOINT, checkpoint)
        _move(before / INFO, info)
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is half done: {error}", "the same command again carries it through, --undo takes it back"
        ) from error


def _take_back(folder: Path, record: ArealRecord) -> None:
    record = dataclasses.replace(record, phase=UNDOING)
    _write(folder, record)
    _carry_through(folder, record)


def undo(trial: TrialFolder) -> str:
    """Restore AReaL's own files; returns what is there now. Raises StorageError where there is nothing to restore, or
    AReaL has written others since; those may be moved away."""
    finish(trial)
    records = _records(trial)
    if not records:
        raise StorageError(f"nothing was set up for {trial.name}, or it was undone already")
    folder, record = max(records, key=lambda item: item[1].prepared_at)
    step = _step_in_place(record)
    if step != record.global_step and Path(record.info).exists():
        now = "a step that can't be read" if step is None else f"step {step}"
        raise StorageError(
            f"{record.info} is of {now} by now: AReaL has trained on from step {record.global_step}",
            f"what was there before lies in {folder / BEFORE}",
        )
    _take_back(folder, record)
    return f"{record.info} and {record.checkpoint} are as they were before"


def _step_in_place(record: ArealRecord) -> int | None:
    name = read_recover_info(Path(record.info), Path(record.checkpoint)).name
    return None if name is None else name.global_step


def _move(source: Path, target: Path) -> None:
    """Where `source` is there; both names are on the disk on return."""
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        sync_folder(source.parent)
        sync_folder(target.parent)


def read_areal_record(folder: Path) -> ArealRecord | None:
    try:
        data = json.loads((folder / RECORD).read_bytes())
        return ArealRecord(**data) if data["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, record: ArealRecord) -> None:
    replace_file(folder / RECORD, encode(dataclasses.asdict(record)))
