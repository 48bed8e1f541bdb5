"""Which runs there are below a fileroot, and the paths of one by its name `user/experiment/trial`."""

from __future__ import annotations

import time
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.base.wording import some_of
from launcher.reporting.current_status import read_now
from launcher.reporting.terminal_text import visible
from launcher.run_files.run_paths import RunPaths
from scripts.run_processes import is_live

MOST = 200


def list_runs(fileroot: Path) -> list[dict[str, object]]:
    """The MOST whose files changed last, that one first; `live` as far as this machine can see."""
    aged = sorted(((_changed(paths), paths) for paths in runs_below(fileroot)), key=lambda one: -one[0])
    return [
        {
            "run": name_of(paths),
            "title": visible(paths.title),
            "user": paths.user,
            "live": is_live(paths),
            "age_s": max(time.time() - changed, 0.0),
            "steps": None if (now := read_now(paths)) is None or now.status is None else now.status.next_step,
        }
        for changed, paths in aged[:MOST]
    ]


def runs_below(fileroot: Path) -> list[RunPaths]:
    """Those that have written something."""
    folders = {
        file.parent for name in ("events.jsonl", "metrics.jsonl") for file in fileroot.glob(f"logs/*/*/*/{name}")
    }
    return [paths for folder in sorted(folders) if (paths := RunPaths.of_logs(folder)) is not None]


def run_of(fileroot: Path, name: str) -> RunPaths:
    """Raises UsageError: there is no such run. A name is looked up and never made a path of."""
    for paths in runs_below(fileroot):
        if name_of(paths) == name:
            return paths
    known = [name_of(paths) for paths in runs_below(fileroot)]
    raise UsageError(f"there is no run {name!r} below {fileroot}", f"there: {some_of(known)}")


def name_of(paths: RunPaths) -> str:
    return f"{paths.user}/{paths.experiment_name}/{paths.trial_name}"


def _changed(paths: RunPaths) -> float:
    """Unix seconds of the newest change; 0 where it can't be seen."""
    times = [0.0]
    for file in (paths.events, paths.metrics, paths.now):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return max(times)
