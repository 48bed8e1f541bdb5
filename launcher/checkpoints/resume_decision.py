"""Does this launch begin anew, go on, or have nothing left to do? Decided before anything is started."""

from __future__ import annotations

from launcher.base.errors import ConfigError
from launcher.checkpoints.checkpoint_store import Checkpoint, CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint, InMemoryCheckpoints
from launcher.checkpoints.pending_restore import TAKEN
from launcher.config.fingerprint import config_fingerprint, fingerprint_differences
from launcher.config.schema import RunConfig
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths


def resume_point(config: RunConfig, paths: RunPaths) -> Checkpoint | InMemoryCheckpoint | None:
    """What to go on from: the newest whole checkpoint, or a newer state in memory; None to begin anew.

    Raises ConfigError where `recover.mode` and what there is contradict each other, and where a setting has
    changed that makes a resume wrong.
    """
    store = CheckpointStore(paths.default_checkpoints)
    found, mode = store.latest_whole(), config.recover.mode
    checkpoint: Checkpoint | InMemoryCheckpoint | None = found.checkpoint
    in_memory = InMemoryCheckpoints(paths).newest_whole(store.list()) if config.recover.memory else None
    if in_memory is not None and (checkpoint is None or in_memory.global_step > checkpoint.global_step):
        checkpoint = in_memory
    if mode == "off":
        if checkpoint is None and not found.skipped:
            return None
        where = checkpoint.folder if isinstance(checkpoint, InMemoryCheckpoint) else paths.default_checkpoints
        raise ConfigError(
            f"recover.mode=off, but {where} already holds checkpoints of this trial",
            "give the new run another trial_name, or resume with recover.mode=auto",
        )
    if checkpoint is None:
        if mode == "auto" and not found.skipped:
            return None
        why = "; ".join(skipped.reason for skipped in found.skipped) or "it is empty"
        raise ConfigError(
            f"no whole checkpoint in {paths.default_checkpoints}: {why}",
            "begin anew with another trial_name" + ("" if mode == "auto" else ", or with recover.mode=auto"),
        )
    _check_fingerprint(config, checkpoint)
    return checkpoint


def _check_fingerprint(config: RunConfig, checkpoint: Checkpoint | InMemoryCheckpoint) -> None:
    if isinstance(checkpoint, InMemoryCheckpoint):
        made_with = checkpoint.facts.config_fingerprint
    else:
        assert checkpoint.manifest is not None  # latest_whole returns only those whose manifest was proven
        made_with = checkpoint.manifest.config_fingerprint
    differences = fingerprint_differences(made_with, config_fingerprint(config))
    if differences:
        raise ConfigError(
            f"{checkpoint} was made with other settings: " + "; ".join(map(str, differences)),
            "set them back to resume, or give the new run another trial_name",
        )


def already_finished(config: RunConfig, paths: RunPaths) -> str:
    """A sentence for the user where the last attempt ended FINISHED under the same length of training, else "".

    A run that is over must not be started again by whatever restarts it.
    """
    last: dict[str, object] = {}
    for line in read_lines(paths.events):
        if str(line.get("event", "")) in {"run.finished", "run.errored", "run.aborted", "run.started", TAKEN}:
            last = line
    lengths = (config.total_train_steps, config.total_train_epochs)
    if last.get("event") != "run.finished" or config.recover.mode == "off":
        return ""
    if (last.get("total_train_steps"), last.get("total_train_epochs")) != lengths:
        return ""
    return (
        f"{config.experiment_name}/{config.trial_name} is FINISHED ({last.get('reason')}); nothing to do.\n"
        f"  → see {paths.logs}; train on with a larger total_train_steps or total_train_epochs, "
        "or begin anew with another trial_name"
    )
