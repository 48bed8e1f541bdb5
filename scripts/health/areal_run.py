"""A run of AReaL's own launcher, as its processes, logs and folders show it: steps, servers, checkpoints, its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from actors.processes.process_tree import Process, command_line, started_at, stat_fields
from launcher.base.errors import LauncherError
from launcher.base.findings import Finding
from launcher.checkpoints.areal_log import STEP_LINE, StepTable, log_of_steps, read_ends, read_step
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.trial_folders import TrialFolder, find_trial
from launcher.diagnosis.reading.log_records import REWARD, FigureNames
from launcher.policy.reward_health import RewardPoint
from launcher.reporting.formats import age
from launcher.run_files.run_paths import RunPaths
from scripts.checkpoints.areal_processes import YOUNG_S, areal_processes, is_of_this_machine, newest_log
from scripts.checkpoints.choosing import read_catalog
from scripts.health.findings import BAD, NOTE, OK, UNKNOWN
from scripts.health.log_times import LogTimes
from scripts.health.recorded_run import LastSteps, RecordedRun, read_run_settings
from scripts.run_processes import STOPPED, state

ROLES = {
    **dict.fromkeys(("launcher.local", "launcher.ray", "launcher.slurm"), "launcher"),
    **dict.fromkeys(("sglang", "llm_server", "vllm"), "server"),
    **dict.fromkeys(("torchrun", "torch.distributed", "train"), "trainer"),
}
"""By what a command has in it, first come."""
OTHER = "the run"
OF_THE_PIPE = ("tee", "sh", "bash", "dash", "stdbuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArealRun:
    """`processes`: of this machine. `names`: of each pid, what it is to the run."""

    trial: TrialFolder
    steps: LastSteps
    total: int
    processes: tuple[Process, ...]
    names: Mapping[int, str]


def is_areals(paths: RunPaths) -> bool:
    """A log of AReaL's, and none of ours."""
    ours = (paths.events, paths.metrics, paths.lock)
    return not any(file.exists() for file in ours) and log_of_steps(paths.logs) is not None


def read_areal(trial: TrialFolder) -> ArealRun:
    log = log_of_steps(trial.logs)
    tables = [] if log is None else _tables(read_ends(log), log.stat().st_mtime)
    processes = tuple(areal_processes(trial))
    return ArealRun(
        trial=trial,
        steps=_last_steps(tables),
        total=max((table.total_steps for _, table in tables), default=0),
        processes=processes,
        names=_roles(processes),
    )


def _roles(processes: Sequence[Process]) -> dict[int, str]:
    """The oldest first: one whose command says nothing is what its parent is."""
    names: dict[int, str] = {}
    for one in processes:
        words = command_line(one)
        by_itself = next((role for part, role in ROLES.items() if part in " ".join(words)), "")
        fields = stat_fields(one.pid)
        inherited = names.get(int(fields[1]), "") if fields else ""
        if Path((words or [""])[0]).name in OF_THE_PIPE:
            names[one.pid] = "log"
        else:
            names[one.pid] = by_itself or (inherited if inherited != "log" else "") or OTHER
    return names


def _tables(data: bytes, changed_at: float) -> list[tuple[float | None, StepTable]]:
    """The steps in the log's beginning and end, with their times."""
    found, dates = [], LogTimes(data, changed_at=changed_at)
    for match in STEP_LINE.finditer(data):
        start = data.rfind(b"\n", 0, match.start()) + 1
        table = read_step(data, start, len(data))
        if table is not None:
            found.append((dates.within(start, match.start()), table))
    return found


def _last_steps(tables: Sequence[tuple[float | None, StepTable]]) -> LastSteps:
    last, names = tables[-50:], FigureNames()
    times = [at for at, _ in last if at is not None]
    seconds = [after - before for before, after in pairwise(times) if after > before]
    means = ((table.global_step, names.pick(table.values).get(REWARD)) for _, table in tables)
    return LastSteps(
        last_step=last[-1][1].global_step if last else None,
        last_at=times[-1] if times else None,
        usual_step_s=median(seconds) if seconds else None,
        rewards=tuple(
            RewardPoint(step=step, mean=mean, low=mean, high=mean)
            for step, mean in means
            if mean is not None and mean == mean
        ),
    )


# ── as what the checks look at ──


def areal_view(run: ArealRun, is_live: bool | None) -> RecordedRun:
    """As a journal would have it; a run that has ended has its reason from the last step in its log."""
    newest = newest_log(run.trial)
    steps, ended_at = run.steps, 0.0 if newest is None else newest[1]
    done = 0 if steps.last_step is None else steps.last_step + 1
    view = RecordedRun(
        started_at=min((started_at(one) for one in run.processes), default=0.0),
        ended_at=ended_at,
        state="RUNNING" if done else "INITIALIZING",
        pids={one.pid for one in run.processes},
        total_steps=run.total or None,
        settings=read_run_settings(run.trial.paths),
    )
    where = f"after {done} of {run.total} steps" if done else "before its first step"
    if is_live is None:
        view.state_reason = f"no process of it is here, and its log is young, {where}: it may run on another machine"
    elif not is_live and done and done == run.total:
        view.status = "FINISHED"
        view.reason = f"all {done} steps are done, by its log"
    elif not is_live:
        view.status = "ENDED"
        view.reason = f"no process of it is left, {where}; its log is {_age(ended_at)} old"
    return view


def _age(at: float) -> str:
    return age(max(time.time() - at, 0.0))


def live_of(run: ArealRun) -> bool | None:
    """None: it may run on another machine, as far as its logs show."""
    if run.processes:
        return True
    newest = newest_log(run.trial)
    is_young = newest is not None and time.time() - newest[1] < YOUNG_S
    return None if is_young and not is_of_this_machine(run.trial) else False


def judge_processes(run: ArealRun, *, is_live: bool | None) -> Finding:
    shown = ", ".join(f"{run.names[one.pid]} {one.pid}" for one in run.processes)
    facts = {"pids": {str(one.pid): run.names[one.pid] for one in run.processes}}
    if not run.processes:
        return Finding("processes", "none on this machine", OK if is_live is False else UNKNOWN, facts=facts)
    stopped = [one for one in run.processes if state(one) in STOPPED]
    if stopped:
        names = ", ".join(f"{run.names[one.pid]} {one.pid}" for one in stopped)
        return Finding("processes", f"stopped, and nothing tells the run so: {names}; of {shown}", BAD, facts=facts)
    if not {"trainer", OTHER} & set(run.names.values()):
        verdict = BAD if run.steps.last_step is not None else UNKNOWN  # while it starts the servers come first
        return Finding("processes", f"no trainer among them: {shown}", verdict, facts=facts)
    return Finding("processes", shown, OK, facts=facts)


def check_areal_checkpoints(run: ArealRun, *, may_be_live: bool) -> list[Finding]:
    """Exports by their names, lengths and headers, AReaL's own recover folder, and the last good one by the logs."""
    catalog = read_catalog(run.trial)
    entries = [one for one in catalog.entries if not one.set_aside_as]
    sound = [one for one in entries if not one.problem]
    good = next(iter(catalog.newest_first(good=True)), None)
    facts = {
        "whole": [one.global_step for one in sound],
        "damaged": {one.path.name: one.problem for one in entries if one.problem},
        "last_good": None if good is None else good.global_step,
    }
    newest = f", the newest of step {sound[-1].global_step}, {_age(sound[-1].created_at)} old" if sound else ""
    seen = f", the last good by its logs of step {good.global_step}" if good else ", none good by its logs"
    verdict = OK if sound else NOTE if may_be_live or catalog.recover_info else BAD
    text = f"{len(sound)} exports complete by their sizes{newest}{seen if entries else ''}"
    damaged = [Finding(one.path.name, one.problem, NOTE) for one in entries if one.problem]
    return [Finding("exports", text, verdict, facts=facts), *damaged, _recovery(catalog, may_be_live)]


def _recovery(catalog: CheckpointCatalog, may_be_live: bool) -> Finding:
    info = catalog.recover_info
    if info is None:
        return Finding("recovery", "AReaL has no recover_info: it could not resume by itself", NOTE)
    if info.problems:  # a live run may be writing it at this moment
        return Finding("recovery", "; ".join(info.problems), NOTE if may_be_live else BAD)
    optimizer = "" if info.has_optimizer else ", without an optimizer"
    step = "?" if info.name is None else info.name.global_step
    return Finding("recovery", f"AReaL would resume after step {step}{optimizer}", OK)


def trial_of_logs(paths: RunPaths) -> TrialFolder:
    """Its folders; one that has saved nothing yet has none."""
    try:
        return find_trial(paths.fileroot, paths.user, paths.experiment_name, paths.trial_name)
    except LauncherError:
        return TrialFolder(paths=paths, root=paths.checkpoints, logs=paths.logs, recover_info=None, is_ours=False)
