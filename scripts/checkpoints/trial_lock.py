"""Holds a trial while a tool works on it: no run of it may start meanwhile, and no other tool.

AReaL has no lock of its own: a run of it is known by its processes and by the age of its logs. Our lock lies beside the
trial's folder, since AReaL reads all that is within; and it is gone afterwards, since the folder is another program's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from launcher.base.errors import StillRunning, StorageError
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.run_files.run_paths import RunLock
from scripts.checkpoints.areal_processes import refuse_running


@contextlib.contextmanager
def held(trial: TrialFolder, tool: str) -> Iterator[None]:
    """Raises StorageError where the run is running, as far as that can be known, or another tool works on it."""
    with contextlib.ExitStack() as stack:
        if not trial.is_ours:
            stack.enter_context(areal_held(trial))
            refuse_running(trial)
        elif trial.paths.logs.is_dir():
            stack.enter_context(RunLock(trial.paths, tool=tool))
        yield


@contextlib.contextmanager
def held_or_running(trial: TrialFolder, tool: str) -> Iterator[bool]:
    """Whether it is a run of ours that is running, which nothing holds. Else as `held`."""
    is_running = False
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(trial, tool))
        except StillRunning:
            is_running = True
        yield is_running


@contextlib.contextmanager
def areal_held(trial: TrialFolder) -> Iterator[None]:
    """Two set-ups at once would take each other's folders for what a kill left. Raises StorageError."""
    file = trial.root.parent / f".{trial.paths.trial_name}.recovery.lock"
    try:
        descriptor = _locked(file)
    except BlockingIOError as error:
        raise StorageError(f"{trial.name} is being worked on: another tool holds {file}", "wait for it") from error
    except OSError as error:
        raise StorageError(
            f"{file} can't be locked: {error.strerror}", "set it up as a user who may write there"
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: whoever waits for this very file finds another name there
        os.close(descriptor)


def _locked(file: Path) -> int:
    """Raises BlockingIOError where another holds it, OSError."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.path.samestat(file.stat(), os.fstat(descriptor)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has just let go, and its name with it
