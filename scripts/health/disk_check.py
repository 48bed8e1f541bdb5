"""Space on the disks of a run, and the checkpoints that it could resume from."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

from launcher.base.disk_faults import DiskFault, fault_of_room
from launcher.base.durable import room
from launcher.base.errors import LauncherError
from launcher.base.findings import Finding, Severity
from launcher.base.messages import Cause
from launcher.base.wording import counted
from launcher.checkpoints.checkpoint_catalog import find_problem
from launcher.checkpoints.checkpoint_store import STAGING, Checkpoint, CheckpointState, CheckpointStore
from launcher.checkpoints.trial_folders import find_trial
from launcher.reporting.formats import age
from launcher.resources.missing_machine import nearest_existing
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import foreign_trainer, read_settings
from scripts.checkpoints.choosing import read_catalog
from scripts.health.areal_run import check_areal_checkpoints
from scripts.health.findings import ABSENT, BAD, NOTE, OK
from scripts.health.machine_check import GIB
from scripts.health.run_check import Subject

LAST = 3
FEW_CHECKPOINTS = 3
LOGS_NEED = 256 * 2**20
SAID = {DiskFault.READ_ONLY: "its disk is mounted read-only"}


def check_disk(subject: Subject) -> list[Finding]:
    paths = subject.paths
    store = paths.default_checkpoints if subject.areal is None else subject.areal.trial.default
    checkpoints = CheckpointStore(store).list()
    sizes = [size for one in checkpoints[-LAST:] if (size := _bytes(one)) > 0]
    folder, logs = nearest_existing(paths.default_checkpoints), nearest_existing(paths.logs)
    findings = [judge_space(str(folder), shutil.disk_usage(folder).free, sizes)]
    for name, place in (("checkpoints", folder), ("logs", logs)):
        found = room(place)
        if (fault := fault_of_room(found)) is not None:
            facts: dict[str, object] = {"cause": Cause.DISK_FULL, "free_bytes": found.free, "free_inodes": found.inodes}
            text = f"{Cause.DISK_FULL}: nothing can be saved in {place}: {SAID.get(fault, fault)}"
            findings.append(Finding(name, text, BAD if subject.may_be_live else NOTE, facts=facts))
    if logs.stat().st_dev != folder.stat().st_dev:
        free = shutil.disk_usage(logs).free
        text = f"{free / GIB:.1f} GiB free in {logs}"
        findings.append(Finding("logs", text, OK if free >= LOGS_NEED else BAD, facts={"free_bytes": free}))
    return findings


def judge_space(folder: str, free: int, sizes: Sequence[int]) -> Finding:
    """`sizes`: bytes of the last checkpoints. The next one is written before an old one is removed."""
    largest = max(sizes, default=None)
    facts: dict[str, object] = {"free_bytes": free, "checkpoint_bytes": largest, "fits": None}
    text = f"{free / GIB:.1f} GiB free in {folder}"
    if largest is None:
        return Finding("checkpoints", f"{text}; no checkpoint yet to take the size of", NOTE, facts=facts)
    fits = free // max(largest, 1)
    verdict = BAD if fits < 1 else NOTE if fits < FEW_CHECKPOINTS else OK
    size = f"{largest / GIB:.2f} GiB" if largest >= GIB / 10 else f"{largest / 2**20:.1f} MiB"
    text += f": room for {counted(int(fits), 'more checkpoint')} of {size}"
    return Finding("checkpoints", text, verdict, facts=facts | {"fits": int(fits)})


def _bytes(checkpoint: Checkpoint) -> int:
    """By its manifest; without one, by its files."""
    if checkpoint.manifest is not None:
        return checkpoint.manifest.total_bytes
    return sum(file.stat().st_size for file in checkpoint.path.rglob("*") if file.is_file())


def check_checkpoints(subject: Subject) -> list[Finding]:
    """Sizes against manifests: a torn one is seen, a flipped bit is not (`scripts.list_checkpoints --verify` does)."""
    folder = subject.paths.default_checkpoints
    if subject.areal is not None:
        return check_areal_checkpoints(subject.areal, may_be_live=subject.may_be_live)
    if foreign := foreign_trainer(read_settings(subject.paths.config)):
        return [Finding("checkpoints", f"{foreign}, which are not looked at here", ABSENT)]
    found = [(one, _problem(one)) for one in CheckpointStore(folder).list()]
    complete = [one for one, problem in found if not problem]
    last_good = _last_good(subject.paths)
    facts = {
        "whole": [one.global_step for one in complete],
        "damaged": {one.path.name: problem for one, problem in found if problem},
        "staged": sorted(path.name for path in folder.glob(f"{STAGING}*")),
        "last_good": last_good,
    }
    if not found and subject.may_be_live:
        return [Finding("checkpoints", "none yet", NOTE, facts=facts)]
    if not found:
        return [Finding("checkpoints", "none: there is nothing to resume from", BAD, facts=facts)]
    damaged = [Finding(one.path.name, problem, _verdict(one)) for one, problem in found if problem]
    newest = f", the newest of step {complete[-1].global_step}, {_age(complete[-1])} old" if complete else ""
    good = f", the last good of step {last_good}" if last_good is not None else ""
    verdict = OK if complete else BAD if any(one.level is BAD for one in damaged) else NOTE
    text = f"{len(complete)} complete by their sizes{newest}{good}"
    return [Finding("checkpoints", text, verdict, facts=facts), *damaged]


def _verdict(checkpoint: Checkpoint) -> Severity:
    """Of one that isn't complete by its manifest. Without a manifest it is another program's, and may be good."""
    return NOTE if checkpoint.state is CheckpointState.UNVERIFIED else BAD


def _problem(checkpoint: Checkpoint) -> str:
    problem = checkpoint.problem or find_problem(checkpoint)
    return problem if checkpoint.path.is_dir() else ""  # else pruned while it was looked at


def _age(checkpoint: Checkpoint) -> str:
    assert checkpoint.manifest is not None
    return age(time.time() - checkpoint.manifest.created_at)


def _last_good(paths: RunPaths) -> int | None:
    """As `scripts.list_checkpoints` has it. Of our runs only: for AReaL's all of its logs would have to be read."""
    try:
        trial = find_trial(paths.fileroot, paths.user, paths.experiment_name, paths.trial_name)
        good = read_catalog(trial).last_good if trial.is_ours else None
    except LauncherError:
        return None
    return None if good is None else good.global_step
