"""Decides before anything is started whether a launch starts from the beginning, resumes, or has nothing left."""

from __future__ import annotations

from launcher.base.errors import ConfigError
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog, NewestToResume
from launcher.checkpoints.checkpoint_store import Checkpoint
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint
from launcher.checkpoints.restore_request import asked_checkpoint, pending_restore
from launcher.config.fingerprint import config_fingerprint, fingerprint_differences
from launcher.config.schema import RunConfig
from launcher.run_files.run_ends import FINISHED
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import read_run_log


def resume_point(config: RunConfig, paths: RunPaths) -> Checkpoint | InMemoryCheckpoint | None:
    """What to resume from: what a person asked for, else the newest complete checkpoint, or a newer state in memory;
    None to start afresh.

    Raises ConfigError where `recover.mode` and what there is contradict each other, and where a setting has
    changed that makes a resume wrong.
    """
    mode = config.recover.mode
    checkpoint: Checkpoint | InMemoryCheckpoint | None = asked_checkpoint(paths)
    found = NewestToResume(checkpoint=checkpoint, skipped=())
    if checkpoint is None:
        found = CheckpointCatalog.of_run(config, paths).newest_to_resume()
        checkpoint = found.checkpoint
    if mode == "off":
        if checkpoint is None and not found.skipped:
            return None
        where = checkpoint.path if isinstance(checkpoint, InMemoryCheckpoint) else paths.default_checkpoints
        raise ConfigError(
            f"recover.mode=off, but {where} already holds checkpoints of this trial",
            "give the new run another trial_name, or resume with recover.mode=auto",
        )
    if checkpoint is None:
        if mode == "auto" and not found.skipped:
            return None
        raise ConfigError(
            f"no complete checkpoint in {paths.default_checkpoints}: {'; '.join(found.skipped) or 'it is empty'}",
            "start over with another trial_name" + ("" if mode == "auto" else ", or with recover.mode=auto"),
        )
    differences = fingerprint_differences(checkpoint.config_fingerprint, config_fingerprint(config))
    if differences:
        raise ConfigError(
            f"{checkpoint} was made with other settings: " + "; ".join(map(str, differences)),
            "set them back to resume, or give the new run another trial_name",
        )
    return checkpoint


def already_finished(config: RunConfig, paths: RunPaths) -> str:
    """A sentence for the user where the last attempt ended FINISHED under the same length of training, and nobody has
    asked it to go back since; else "".

    A run that is over must not be started again by whatever restarts it.
    """
    log = read_run_log(paths, with_steps=False)
    last, lengths = log.last_end(), (config.total_train_steps, config.total_train_epochs)
    if last is None or last["event"] != FINISHED or log.was_taken_back or config.recover.mode == "off":
        return ""
    if (last.get("total_train_steps"), last.get("total_train_epochs")) != lengths:
        return ""
    if pending_restore(paths) is not None or paths.recover_checkpoint.is_dir():  # taken, or refused, as it resumes
        return ""
    return (
        f"{config.experiment_name}/{config.trial_name} is FINISHED ({last.get('reason')}); nothing to do.\n"
        f"  → see {paths.logs}; train on with a larger total_train_steps or total_train_epochs, "
        "or start over with another trial_name"
    )
