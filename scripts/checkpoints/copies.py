"""The copies of a trial's checkpoints at its URL (`recover.url`), as their manifests describe them."""

from __future__ import annotations

import argparse

from launcher.base.addresses import url_problem
from launcher.base.errors import UsageError
from launcher.checkpoints.remote_store import RemoteCheckpoint, RemoteStore


def read_copies(given: argparse.Namespace) -> tuple[str, tuple[RemoteCheckpoint, ...]]:
    """Where they are, and those that are complete, the newest last. Raises UsageError and CheckpointError."""
    if given.experiment_name is None or given.trial_name is None:
        raise UsageError("--url lists the copies of one trial", "give --experiment-name and --trial-name too")
    if problem := url_problem(given.url):
        raise UsageError("--url can't be used (not shown)", problem)
    remote = RemoteStore(given.url, experiment_name=given.experiment_name, trial_name=given.trial_name)
    return remote.where, remote.list()


def copy_facts(copy: RemoteCheckpoint, now: float) -> dict[str, object]:
    return {
        "name": str(copy.name),
        "global_step": copy.name.global_step,
        "age_s": now - copy.manifest.created_at,
        "bytes": copy.manifest.total_bytes,
        "reward_mean": copy.manifest.reward_mean,
        "keep": copy.keep,
    }


def copy_line(copy: RemoteCheckpoint, now: float) -> str:
    manifest = copy.manifest
    minutes, megabytes = int((now - manifest.created_at) // 60), manifest.total_bytes / 2**20
    reward = "" if manifest.reward_mean is None else f"{manifest.reward_mean:.3f}"
    return f"{manifest.global_step:>6}  {minutes:>6} min  {megabytes:>10,.1f} MB  {reward:>6}  {'kept' * copy.keep}"
