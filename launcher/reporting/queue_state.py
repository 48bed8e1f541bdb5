"""Reads what the newest checkpoint of a run says of the prompts' queue (position.json, docs/files.md)."""

from __future__ import annotations

import json
from typing import Any

from launcher.base.errors import DiskError
from launcher.checkpoints.checkpoint_folder import Checkpoint, CheckpointState, list_folder
from launcher.checkpoints.manifest import POSITION_FILE, find_faults
from launcher.reporting.ledger_audit import QueueState
from launcher.run_files.run_paths import RunPaths


def read_queue_state(paths: RunPaths, until: int | None) -> QueueState | str:
    """Of the newest checkpoint, of step `until` or an earlier one; or why it is not known."""
    try:
        found = [one for one in list_folder(paths.default_checkpoints) if one.state is CheckpointState.COMMITTED]
    except DiskError as error:
        return error.message
    known = [one for one in found if until is None or one.global_step <= until]
    if not known:
        return f"{paths.default_checkpoints} has no complete checkpoint" + ("" if until is None else " of these steps")
    return _queue_state(known[-1])


def _queue_state(checkpoint: Checkpoint) -> QueueState | str:
    """Where its file is still the one that was saved, as the manifest shows."""
    file = checkpoint.path / POSITION_FILE
    try:
        state = json.loads(file.read_bytes())
        found = _of(state["position"], state["queue"])
        files = {} if checkpoint.manifest is None else checkpoint.manifest.files
        faults = find_faults(checkpoint.path, {POSITION_FILE: files[POSITION_FILE]})
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{file} can't be read: {error!r}"
    return faults[0].text if faults else found


def _of(position: Any, queue: Any) -> QueueState:
    """Raises KeyError, TypeError and ValueError where something is not there, or is not what it must be."""
    return QueueState(
        step=int(position["next_step"]) - 1,
        epoch=int(queue["epoch"]),
        cursor=int(queue["cursor"]),
        returned=tuple(map(str, (*queue["first"], *queue["last"]))),
        fingerprint=str(queue["fingerprint"]),
    )
