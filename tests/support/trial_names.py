"""What the trial of the tests is called, and its checkpoints. Without torch, for processes that need no more."""

from launcher.checkpoints.checkpoint_store import CheckpointName
from launcher.run_files.run_paths import RunPaths, login_name

EXPERIMENT, TRIAL, USER = "exp", "t1", login_name()
NAMES = ("--experiment-name", EXPERIMENT, "--trial-name", TRIAL, "--user", USER)
"""As a tool is told of it, beside --fileroot."""
STEPS_PER_EPOCH = 80


def name_of(step, per_epoch=STEPS_PER_EPOCH):
    return CheckpointName(epoch=step // per_epoch, epoch_step=step % per_epoch, global_step=step)


def trial_paths(root):
    return RunPaths(fileroot=root, user=USER, experiment_name=EXPERIMENT, trial_name=TRIAL)
