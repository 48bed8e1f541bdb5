"""The plan of a run whose trainer is another project's, and what keeps it from starting (docs/adapters.md)."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.adapters.areal_settings import AREAL, ArealSettings, areal_settings
from launcher.adapters.command_adapter import missing_program, reward_check
from launcher.adapters.foreign_health import NOT_OURS, why_not_whole
from launcher.adapters.trainer_adapter import TrainerAdapter, adapter_of
from launcher.base.errors import ConfigError, UsageError
from launcher.base.findings import Severity
from launcher.config.foreign import SERVERS
from launcher.config.schema import RunConfig
from launcher.resources.config_checks import token_pool_on_cpu
from launcher.resources.environment_checks import check_temporary_folders
from launcher.resources.hardware import device_for, find_hardware
from launcher.resources.missing_machine import missing_login, missing_webhook, missing_writer
from launcher.resources.node_checks import check_packages
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import read_run_log

SUPERVISED = "supervised"


def with_their_names(config: RunConfig, keys: Collection[str]) -> RunConfig:
    """AReaL's run has the names that its YAML gives it, and a folder of the launcher's own beside its files, which have
    the same names; with trainer.rung=servers also the model and the servers of that YAML. `keys`: those that the
    command line sets, which come first. Raises ConfigError."""
    if config.trainer.adapter != AREAL:
        return config
    settings = areal_settings(config.trainer)
    theirs = settings.paths
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
        sglang=replace(config.sglang, **dict(_their_servers(config, settings, keys))),
    )


def _their_servers(config: RunConfig, settings: ArealSettings, keys: Collection[str]) -> Iterator[tuple[str, Any]]:
    if config.trainer.rung != SERVERS:
        return
    for key, said in settings.servers().items():
        value = said
        if key == "model_path" and isinstance(value, str):
            if "actor.path" in keys:
                continue
            if (below := Path(config.trainer.cwd) / Path(value).expanduser()).is_dir():
                value = str(below.resolve())
        if f"sglang.{key}" not in keys:
            yield key, value


def plan_lines(config: RunConfig) -> Iterator[str]:
    """What is run, how it is seen, and what is done when it fails. Raises ConfigError."""
    trainer, adapter = config.trainer, adapter_of(config.trainer)
    yield f"plan of {config.experiment_name}/{config.trial_name}, in {config.cluster.fileroot}"
    rung = "B, servers" if trainer.rung == SERVERS else "A, a command"
    yield f"rung {rung} ({trainer.adapter}): {shlex.join(adapter.command(None).words)}"
    if trainer.rung == SERVERS:
        yield f"in {trainer.cwd}; rollouts and gate are its own"
        yield f"servers: {config.sglang.n_servers} SGLang of {config.sglang.model_path}"
        if trainer.adapter == AREAL and (theirs := areal_settings(trainer).servers()):
            named = ", ".join(f"sglang.{key}" for key in theirs)
            yield f"from {trainer.config}, where the command does not set them: {named}"
        yield f"their addresses, which never change: ${trainer.addresses_env}; weights by /update_weights_from_disk"
    else:
        yield f"in {trainer.cwd}; servers, rollouts and gate are its own"
    yield f"steps: {adapter.source or 'its output'}, by {adapter.reads}"
    if (check := reward_check(trainer)) is not None:
        yield f"rewards: where they fall, {shlex.join(check)} says whether the reward function is at fault"
    yield from adapter.plan()
    yield f"after a failure it is restarted up to {config.restart.restore} times without progress"


def find_missing_for_command(config: RunConfig) -> list[UsageError]:
    """Everything that keeps it from starting here. On a cluster elsewhere, its folder can't be seen."""
    is_here = config.cluster.address == "local"
    adapter, check = adapter_of(config.trainer), reward_check(config.trainer)
    return [
        *(adapter.missing() if is_here else ()),
        *(missing_program("trainer.reward_check", check, config.trainer) if is_here and check else ()),
        *(_model(config) if config.trainer.rung == SERVERS else ()),
        *(_unusable_sglang() if config.trainer.rung == SERVERS and is_here else ()),
        *(_checkpoints(config, adapter) if is_here else ()),
        *((check.error() for check in check_temporary_folders() if check.stops) if is_here else ()),
        *missing_login(config),
        *missing_writer(config),
        *missing_webhook(config),
    ]


def _unusable_sglang() -> Iterator[UsageError]:
    return (check.error() for check in check_packages() if check.level is Severity.BAD)


def _model(config: RunConfig) -> Iterator[UsageError]:
    """What its servers start from, and go back to where it starts from its beginning."""
    path = config.sglang.model_path
    if not (Path(path) / "config.json").is_file():
        given = f"actor.path={path or 'null'}: with trainer.rung=servers, the model's folder"
        yield ConfigError(given, "set actor.path to the folder of the model that the trainer begins with")
    device = device_for(config.sglang.device, find_hardware())
    for key, allowed in token_pool_on_cpu(config, device):
        yield ConfigError(f"{key}=null: allowed: {allowed}", f"set {key}")


def served(config: RunConfig) -> RunConfig:
    """With the command's own resources in the place of the launcher's trainer, where it asks the launcher's servers."""
    if config.trainer.rung != SERVERS:
        return config
    return replace(config, actor=replace(config.actor, device="cpu", dp_size=1, num_cpus=config.trainer.num_cpus))


def _checkpoints(config: RunConfig, adapter: TrainerAdapter) -> Iterator[UsageError]:
    """What is on the disk against `recover.mode`; and nothing of an earlier, unsupervised run may be set aside."""
    found, mode = adapter.checkpoints(), config.recover.mode
    log = read_run_log(RunPaths.of(config))
    lines = [one.head for one in log.standing()[0]]
    whole = [one for one in found if not why_not_whole(one, lines)]
    if mode == "off" and found:
        yield ConfigError(
            f"recover.mode=off, and {found[-1].path} is there", "move it, or resume with recover.mode=auto"
        )
    elif mode == "on" and not whole:
        yield ConfigError("recover.mode=on, and there is no whole checkpoint", "set recover.mode=auto")
    elif not log.has_started_trainer and (unknown := [one for one in found if one not in whole]):
        yield ConfigError(
            f"{unknown[-1].path}: {why_not_whole(unknown[-1], lines)}, and this run has not made it", NOT_OURS
        )
