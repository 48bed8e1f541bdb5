"""The plan of a run whose trainer is another project's, and what keeps it from starting (docs/adapters.md)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from launcher.adapters.foreign_health import was_started, why_not_whole
from launcher.adapters.trainer_adapter import TrainerAdapter, adapter_of
from launcher.base.errors import ConfigError, UsageError
from launcher.config.schema import RunConfig
from launcher.resources.missing_machine import missing_login, missing_webhook
from launcher.run_files.journal import current_lines, read_lines
from launcher.run_files.run_paths import RunPaths


def plan_lines(config: RunConfig) -> Iterator[str]:
    """What is run, how it is seen, and what is done when it fails. Raises ConfigError."""
    trainer, adapter = config.trainer, adapter_of(config.trainer)
    yield f"plan of {config.experiment_name}/{config.trial_name}, in {config.cluster.fileroot}"
    yield f"rung A, a command ({trainer.adapter}): {shlex.join(adapter.command(None).words)}"
    yield f"in {trainer.cwd}; servers, rollouts and gate are its own"
    yield f"steps: {adapter.source or 'its output'}, by {adapter.reads}"
    if trainer.checkpoints is None:
        yield "note: trainer.checkpoints=null: after a failure it starts from the beginning"
        return
    resumed = adapter.command(Path(trainer.checkpoints)).words[len(adapter.command(None).words) :]
    how = f"resumes with {shlex.join(resumed)}" if resumed else "resumes from its newest by itself"
    yield f"checkpoints: {trainer.checkpoints}; it {how}, up to {config.restart.restore} times without progress"


def find_missing_for_command(config: RunConfig) -> list[UsageError]:
    """Everything that keeps it from starting here. On a cluster elsewhere, its folder can't be seen."""
    is_here = config.cluster.address == "local"
    adapter = adapter_of(config.trainer)
    return [
        *(adapter.missing() if is_here else ()),
        *(_checkpoints(config, adapter) if is_here else ()),
        *missing_login(config),
        *missing_webhook(config),
    ]


def _checkpoints(config: RunConfig, adapter: TrainerAdapter) -> Iterator[UsageError]:
    """What is on the disk against `recover.mode`; and nothing of an earlier, unsupervised run may be set aside."""
    found, mode, pattern = adapter.checkpoints(), config.recover.mode, config.trainer.checkpoints
    paths = RunPaths.of(config)
    lines = current_lines(read_lines(paths.metrics))
    whole = [one for one in found if not why_not_whole(one, lines)]
    if mode == "off" and found:
        yield ConfigError(
            f"recover.mode=off, and {found[-1].path} is there", "move it, or resume with recover.mode=auto"
        )
    elif mode == "on" and not whole:
        yield ConfigError(f"recover.mode=on, and no whole checkpoint is at {pattern}", "set recover.mode=auto")
    elif not was_started(paths) and (unknown := [one for one in found if one not in whole]):
        yield ConfigError(
            f"{unknown[-1].path}: {why_not_whole(unknown[-1], lines)}, and this run has not made it",
            "move it away, or set trainer.checkpoint_file to the file that is written last into each",
        )
