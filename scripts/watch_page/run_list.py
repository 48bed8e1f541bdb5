"""Which runs there are below a fileroot, and the paths of one by its name `user/experiment/trial`."""

from __future__ import annotations

import time
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.base.wording import some_of
from launcher.reporting.current_status import read_now
from launcher.reporting.terminal_text import visible
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.run_search import names_in, runs_below
from scripts.run_processes import is_live

MOST = 200
NEVER = -1.0


def list_runs(fileroot: Path) -> list[dict[str, object]]:
    """The MOST whose files changed last, that one first; `live` as far as this machine can see."""
    aged = sorted(
        ((_changed_at(paths.events, paths.metrics, paths.now), paths) for paths in written_runs(fileroot)),
        key=lambda one: -one[0],
    )
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


def written_runs(fileroot: Path) -> list[RunPaths]:
    """Those that have written something."""
    return [paths for paths in runs_below(fileroot) if _changed_at(paths.events, paths.metrics) != NEVER]


def run_of(fileroot: Path, name: str) -> RunPaths:
    """Raises UsageError: there is no such run. A name is looked up and never made a path of."""
    known = {name_of(paths): paths for paths in written_runs(fileroot)}
    if name not in known:
        raise UsageError(f"there is no run {name!r} below {fileroot}", f"there: {some_of([*known])}")
    return known[name]


def name_of(paths: RunPaths) -> str:
    return "/".join(names_in(paths))


def _changed_at(*files: Path) -> float:
    """Unix seconds of the newest change; NEVER where there is none, or this user may not see it, as in another user's
    folder."""
    times = [NEVER]
    for file in files:
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return max(times)
