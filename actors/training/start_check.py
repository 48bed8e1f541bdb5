"""What a run refuses when it starts and needs no Ray for, found by a dry run too. Nothing is written or taken.

Whoever gives the real command pays for Ray, the servers and the model before the trainer finds the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.data.prompts import ChatTokenizer
from actors.data.training_data import gathered, queue_of
from actors.episodes.turn_tokens import TurnTokens
from launcher.base.errors import CheckpointError
from launcher.base.rollouts import Prompt
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.checkpoints.restore_request import restore_is_asked
from launcher.checkpoints.resume_decision import already_finished, resume_point
from launcher.checkpoints.uploads import remote_of
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths


def check_template(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raises ModelError where episodes can't be continued by the chat template."""
    if config.rollout.episode is not None:
        TurnTokens(tokenizer, config.chat).check_template()


def check_resume(config: RunConfig, prompts: Mapping[str, Sequence[Prompt]]) -> str:
    """What the run would begin with, for the user; "" for a new one. `prompts`: of each data set; empty where they
    could not be built here. Raises ConfigError, CheckpointError and DataError where it would be refused."""
    paths = RunPaths.of(config)
    if finished := already_finished(config, paths):
        return finished
    if remote_of(config) is not None and not restore_is_asked(paths):  # what is there may be fetched first
        return ""
    found = resume_point(config, paths)
    if found is None:
        return ""
    _check_position(config, prompts, found.path / POSITION_FILE)
    return f"resumes from {found}"


def _check_position(config: RunConfig, prompts: Mapping[str, Sequence[Prompt]], path: Path) -> None:
    """As the trainer does when it has loaded the model: is the data that of the checkpoint?"""
    if not prompts:
        return
    try:
        state = json.loads(path.read_text())["queue"]
        queue_of(config, gathered(config, prompts)).load_state_dict(state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}", "resume from an older checkpoint") from error
