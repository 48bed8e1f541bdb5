"""Reads what the newest checkpoint of a run says of the prompts' queue (position.json, docs/files.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.base.errors import DiskError
from launcher.checkpoints.checkpoint_folder import CheckpointState, list_folder
from launcher.checkpoints.manifest import POSITION_FILE
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
    return _queue_state(known[-1].path / POSITION_FILE)


def _queue_state(file: Path) -> QueueState | str:
    try:
        state = json.loads(file.read_bytes())
        return _of(state["position"], state["queue"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{file} can't be read: {error!r}"


def _of(position: Any, queue: Any) -> QueueState:
    """Raises KeyError, TypeError and ValueError where something is not there, or is not what it must be."""
    return QueueState(
        step=int(position["next_step"]) - 1,
        epoch=int(queue["epoch"]),
        cursor=int(queue["cursor"]),
        returned=tuple(map(str, (*queue["first"], *queue["last"]))),
        fingerprint=str(queue["fingerprint"]),
    )
