"""Finds the processes of an AReaL run on this machine, and whether it may be running on another.

Its launcher pipes each process's output through `tee -a {logs}/….log`: who holds a log of the trial open for writing is
of the run, with the shell and the launcher above it and all below these. A trainer that was started by hand is found
where its command names experiment and trial; so is this launcher, but for a tool that it starts itself, whose trainer
is down then. On another machine's a log that is still young is all there is to see.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from actors.processes.process_tree import PROC, Process, command_line, descendants, identify
from launcher.base.errors import StorageError
from launcher.checkpoints.areal_folders import SUPERVISED
from launcher.checkpoints.areal_log import read_servers
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.reporting.formats import age
from scripts.run_processes import all_processes

YOUNG_S = 120.0
"""A run's log that is younger may be written to on another machine."""
OF_A_LAUNCHER = ("areal", "torchrun", "torch.distributed")
LAUNCHER = "launcher"
ACCESS_MODE = os.O_WRONLY | os.O_RDWR


def areal_processes(trial: TrialFolder) -> list[Process]:
    """Of the trial, on this machine, as far as this user may see them; without those that this tool was started by."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    names = {f"experiment_name={trial.paths.experiment_name}", f"trial_name={trial.paths.trial_name}"}
    prefix = f"{trial.logs.resolve()}/"
    found: set[Process] = set()
    for process in all_processes():
        if process.pid not in own and (_writes_below(process, prefix) or _names(process, names)):
            top = _top_of(process, prefix, own)
            found |= {top, process, *descendants(top.pid)}
    return sorted((one for one in found if one.pid not in own), key=lambda one: (one.started, one.pid))


def _names(process: Process, names: set[str]) -> bool:
    words = command_line(process)
    if SUPERVISED in os.environ and any(word.partition(".")[0] == LAUNCHER for word in words):
        return False
    return names <= set(words) and not any(word.startswith("scripts.") for word in words)


def _writes_below(process: Process, prefix: str) -> bool:
    """A reader, as `tail -f`, does not count."""
    for entry in _fds(process):
        with contextlib.suppress(OSError, ValueError, IndexError):  # closed meanwhile
            if str(entry.readlink()).startswith(prefix):
                info = (PROC / str(process.pid) / "fdinfo" / entry.name).read_text()
                flags = int(info.partition("flags:")[2].split()[0], 8)
                if flags & ACCESS_MODE:
                    return True
    return False


def _fds(process: Process) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # gone, or another user's
        yield from (PROC / str(process.pid) / "fd").iterdir()


def _top_of(process: Process, prefix: str, own: set[int]) -> Process:
    """Up to the launcher: the highest of its parents that, like all in between, has to do with it by its command."""
    top = process
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process(process.pid).parents():
            above = identify(parent.pid)
            text = " ".join(command_line(above)) if above else ""
            if above is None or above.pid in own or not (prefix in text or any(one in text for one in OF_A_LAUNCHER)):
                break
            top = above
    return top


def newest_log(trial: TrialFolder) -> tuple[Path, float] | None:
    """The log that was written last, and when; None where there is none."""
    found = [(log, log.stat().st_mtime) for log in trial.logs.glob("*.log")]
    return max(found, key=lambda item: item[1], default=None)


def is_of_this_machine(trial: TrialFolder) -> bool | None:
    """By the addresses of its servers; None where its logs name none."""
    hosts = [urlsplit(url).hostname or "" for url in read_servers(trial.logs)]
    if not hosts:
        return None
    local = {"localhost"} | {one.address for each in psutil.net_if_addrs().values() for one in each}
    return any(host in local for host in hosts)


def refuse_running(trial: TrialFolder) -> None:
    """Raises StorageError where the run is running, or may be."""
    if found := areal_processes(trial):
        shown = ", ".join(f"{_short(one)} ({one.pid})" for one in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise StorageError(f"{trial.name} is running: {shown}{more}", f"end it first: kill {found[0].pid}")
    newest = newest_log(trial)
    if newest is None or is_of_this_machine(trial):
        return
    log, written_at = newest
    if (young := time.time() - written_at) < YOUNG_S:
        raise StorageError(
            f"{trial.name} may be running on another machine: {log} was written {age(young)} ago",
            f"end it there; where it has ended, wait until the log is {YOUNG_S:.0f} s old",
        )


def _short(process: Process) -> str:
    words = [word for word in command_line(process) if word and not word.startswith("-")]
    named = [word for word in words[:3] if word != "bash"]
    return " ".join(Path(word).name for word in named)[:40] or "a process"
