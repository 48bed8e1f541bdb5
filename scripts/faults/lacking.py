"""What a run must have been started with for some kinds of fault."""

from __future__ import annotations

from launcher.base.errors import UsageError
from launcher.run_files.run_paths import RunPaths
from scripts.faults import files, interposer, starving
from scripts.faults.find import RunProcesses
from scripts.faults.switch import find_switch


def lacking(kind: str, paths: RunPaths, found: RunProcesses) -> None:
    """Raises UsageError where this run was not started in the way that `kind` needs, whatever comes."""
    if kind in {"S1", "S2", "S3", "T3", "X-reward"}:
        find_switch(paths, found)
    if kind in {"C8", "X-load", "X-busy"}:
        interposer.check_interposed(paths)
    if kind == "T5":
        files.check_small_disk(paths.default_checkpoints)
    if kind in {"T6", "T7"}:
        starving.check_starving(kind, found)
    if kind == "M1" and not found.supervisors:
        raise UsageError("neither HealthMonitor nor Coordinator is below this run's driver", "M1 needs one of them")
    if kind == "N1" and not found.raylets:
        raise UsageError("no raylet is below this run's driver", "a cluster that the run joined isn't its own to break")
