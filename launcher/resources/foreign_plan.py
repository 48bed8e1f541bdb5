"""The plan of a run whose trainer is another project's, and what keeps it from starting (docs/adapters.md)."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from launcher.adapters.areal_settings import AREAL, areal_settings
from launcher.adapters.foreign_health import NOT_OURS, was_started, why_not_whole
from launcher.adapters.trainer_adapter import TrainerAdapter, adapter_of
from launcher.base.errors import ConfigError, UsageError
from launcher.config.schema import RunConfig
from launcher.resources.missing_machine import missing_login, missing_webhook
from launcher.run_files.journal import current_lines, read_lines
from launcher.run_files.run_paths import RunPaths

SUPERVISED = "supervised"


def with_their_names(config: RunConfig, keys: Collection[str]) -> RunConfig:
    """AReaL's run has the names that its YAML gives it, and a folder of the launcher's own beside its files, which have
    the same names. `keys`: those that the command line sets. Raises ConfigError."""
    if config.trainer.adapter != AREAL:
        return config
    theirs = areal_settings(config.trainer).paths
    for key in ("experiment_name", "trial_name"):
        given, name = getattr(config, key), getattr(theirs, key)
        if key in keys and given != name:
            raise ConfigError(f"{key}={given}, and {config.trainer.config} says {name}", f"leave {key} out")
    root = Path(config.cluster.fileroot) if "cluster.fileroot" in keys else theirs.fileroot / SUPERVISED
    if root.resolve() == theirs.fileroot.resolve():
        hint = f"leave it out: its folder {SUPERVISED} is taken"
        raise ConfigError(f"cluster.fileroot={root} is AReaL's own, whose files have the same names", hint)
    return replace(
        config,
        experiment_name=theirs.experiment_name,
        trial_name=theirs.trial_name,
        cluster=replace(config.cluster, fileroot=str(root)),
    )


def plan_lines(config: RunConfig) -> Iterator[str]:
    """What is run, how it is seen, and what is done when it fails. Raises ConfigError."""
    trainer, adapter = config.trainer, adapter_of(config.trainer)
    yield f"plan of {config.experiment_name}/{config.trial_name}, in {config.cluster.fileroot}"
    yield f"rung A, a command ({trainer.adapter}): {shlex.join(adapter.command(None).words)}"
    yield f"in {trainer.cwd}; servers, rollouts and gate are its own"
    yield f"steps: {adapter.source or 'its output'}, by {adapter.reads}"
    yield from adapter.plan()
    yield f"after a failure it is restarted up to {config.restart.restore} times without progress"


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
    found, mode = adapter.checkpoints(), config.recover.mode
    paths = RunPaths.of(config)
    lines = current_lines(read_lines(paths.metrics))
    whole = [one for one in found if not why_not_whole(one, lines)]
    if mode == "off" and found:
        yield ConfigError(
            f"recover.mode=off, and {found[-1].path} is there", "move it, or resume with recover.mode=auto"
        )
    elif mode == "on" and not whole:
        yield ConfigError("recover.mode=on, and there is no whole checkpoint", "set recover.mode=auto")
    elif not was_started(paths) and (unknown := [one for one in found if one not in whole]):
        yield ConfigError(
            f"{unknown[-1].path}: {why_not_whole(unknown[-1], lines)}, and this run has not made it",
            NOT_OURS,
        )
