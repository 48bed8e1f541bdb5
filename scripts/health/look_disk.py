"""Room on the disks of a run, and the checkpoints that it could go on from."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from launcher.base.errors import CheckpointError, LauncherError
from launcher.checkpoints.checkpoint_catalog import read_shelf
from launcher.checkpoints.checkpoint_folder import check_checkpoint_sizes
from launcher.checkpoints.checkpoint_store import STAGING, Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.trial_folders import find_trial
from launcher.diagnosis.health.finding import CheckResult, Finding
from launcher.diagnosis.health.judge_machine import GIB, judge_room
from launcher.policy.checkpoint_status import CheckpointStatus
from launcher.run_files.run_paths import RunPaths
from scripts.health.look_run import Subject

LAST = 3
LOGS_NEED = 256 * 2**20


def check_disk(subject: Subject) -> list[Finding]:
    paths = subject.paths
    checkpoints = CheckpointStore(paths.default_checkpoints).list()
    sizes = [size for one in checkpoints[-LAST:] if (size := _bytes(one)) > 0]
    there = _existing(paths.default_checkpoints)
    free = shutil.disk_usage(there).free
    found = [judge_room(str(there), free, sizes)]
    logs = _existing(paths.logs)
    for folder in (there, logs):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            verdict = CheckResult.NOTE if subject.is_live is False else CheckResult.BAD
            name = "checkpoints" if folder == there else "logs"
            said = f"{folder} is on a disk that is mounted read-only: nothing can be saved there"
            found.append(Finding(check="disk", subject=name, verdict=verdict, said=said))
    if logs.stat().st_dev != there.stat().st_dev:
        free = shutil.disk_usage(logs).free
        verdict = CheckResult.OK if free >= LOGS_NEED else CheckResult.BAD
        said = f"{free / GIB:.1f} GiB free in {logs}"
        found.append(Finding(check="disk", subject="logs", verdict=verdict, said=said, facts={"free_bytes": free}))
    return found


def _bytes(checkpoint: Checkpoint) -> int:
    """By its manifest; of one without, by its files."""
    if checkpoint.manifest is not None:
        return checkpoint.manifest.total_bytes
    return sum(file.stat().st_size for file in checkpoint.path.rglob("*") if file.is_file())


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def check_checkpoints(subject: Subject) -> list[Finding]:
    """Sizes against manifests: a torn one is seen, a flipped bit is not (`scripts.list_checkpoints --verify` does)."""
    paths = subject.paths
    found = [_judge(one) for one in CheckpointStore(paths.default_checkpoints).list()]
    whole = [one for one, problem in found if not problem]
    facts = {
        "whole": [one.global_step for one in whole],
        "damaged": {one.path.name: problem for one, problem in found if problem},
        "staged": _staged(paths),
        "last_good": _last_good(paths),
    }
    if not found:
        verdict = CheckResult.NOTE if subject.is_live is not False else CheckResult.BAD
        said = "none yet" if verdict is CheckResult.NOTE else "none: there is nothing to resume from"
        return [Finding(check="checkpoints", subject="checkpoints", verdict=verdict, said=said, facts=facts)]
    findings = [
        Finding(check="checkpoints", subject=one.path.name, verdict=_verdict(one), said=problem)
        for one, problem in found
        if problem
    ]
    newest = f", the newest of step {whole[-1].global_step}{_age(whole[-1])}" if whole else ""
    good = f", the last good of step {facts['last_good']}" if facts["last_good"] is not None else ""
    said = f"{len(whole)} whole by their sizes{newest}{good}"
    verdict = (
        CheckResult.OK
        if whole
        else max(map(_verdict, (one for one, _ in found)), key=[CheckResult.NOTE, CheckResult.BAD].index)
    )
    return [Finding(check="checkpoints", subject="checkpoints", verdict=verdict, said=said, facts=facts), *findings]


def _verdict(checkpoint: Checkpoint) -> CheckResult:
    """Of one that isn't whole by its manifest. One without any is another program's, and may be as good as ours."""
    return CheckResult.NOTE if checkpoint.state is CheckpointState.UNVERIFIED else CheckResult.BAD


def _judge(checkpoint: Checkpoint) -> tuple[Checkpoint, str]:
    """With what is wrong with it."""
    if checkpoint.state is not CheckpointState.COMMITTED:
        return checkpoint, checkpoint.problem
    try:
        check_checkpoint_sizes(checkpoint.path)
    except CheckpointError as error:
        return checkpoint, error.message if checkpoint.path.is_dir() else ""  # pruned while it was looked at
    return checkpoint, ""


def _age(checkpoint: Checkpoint) -> str:
    assert checkpoint.manifest is not None
    seconds = max(time.time() - checkpoint.manifest.created_at, 0.0)
    return f", {seconds:.0f} s old" if seconds < 120 else f", {seconds / 60:.0f} min old"


def _last_good(paths: RunPaths) -> int | None:
    """As `scripts.list_checkpoints` has it; of ours, since of AReaL's all of its logs would have to be read."""
    try:
        trial = find_trial(paths.fileroot, paths.user, paths.experiment_name, paths.trial_name)
        entries = read_shelf(trial).entries if trial.is_ours else ()
    except LauncherError:
        return None
    return max((entry.global_step for entry in entries if entry.standing is CheckpointStatus.GOOD), default=None)


def _staged(paths: RunPaths) -> list[str]:
    folder = paths.default_checkpoints
    return sorted(path.name for path in folder.glob(f"{STAGING}*")) if folder.is_dir() else []
