"""All that a run is after one step, in one form wherever it is kept: in memory after each step, on the disk when due.

A folder has it as the files of the model's state and as `position.json`. That holds the step's lines of ledger and
metrics too: whoever goes back to the state writes those that a kill, or a full disk, has kept back. So a state is never
of a step that the ledger is without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.model.training_state import TrainingState
from actors.training.run_position import RunPosition
from launcher.base.errors import CheckpointError
from launcher.base.messages import StepReport
from launcher.checkpoints.checkpoint_folder import CheckpointName
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.run_files.journal import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """Collected when the step was taken. `report`: of that step; None where the state was saved before reports were."""

    training: TrainingState
    queue: Mapping[str, Any]
    position: RunPosition
    report: StepReport | None

    @property
    def name(self) -> CheckpointName:
        name = self.position.checkpoint_name
        assert name is not None, "before the first step there is nothing to keep"
        return name

    @property
    def policy_version(self) -> int:
        return cast(int, self.training.facts["policy_version"])

    def position_file(self) -> dict[str, object]:
        content: dict[str, object] = {"position": self.position.to_json(), "queue": self.queue}
        if self.report is not None:
            content["report"] = plain(asdict(self.report))  # NaN as text: the file is JSON to every reader
        return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Where a trainer continues. `last`: the last step, whose lines may be missing; None where nothing says."""

    position: RunPosition
    last: StepReport | None = None
    is_from_memory: bool = False


def go_back_to(folder: Path, model: PolicyModel, queue: PromptQueue, *, is_memory: bool = False) -> Restored:
    """Model, optimizer, random states and data position as `folder` has them. Raises CheckpointError where it is
    damaged, DataError where it is of another data set."""
    path = folder / POSITION_FILE
    with _said_of(path):
        content = json.loads(path.read_bytes())
        position, report = RunPosition.from_json(content["position"]), content.get("report")
        last = None if report is None else _report(report)
        queue_state = content["queue"]
    model.load(folder)
    with _said_of(path):
        queue.load_state_dict(queue_state)
    return Restored(position=position, last=last, is_from_memory=is_memory)


@contextmanager
def _said_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}", "resume from an older checkpoint") from error


def _report(data: dict[str, Any]) -> StepReport:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return StepReport(**fields)
