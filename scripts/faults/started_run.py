"""Starts a run as a user does, from outside, and waits for what it writes down."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from actors.processes.process_tree import descendants, send
from launcher.base.errors import HINT, RunError, printed_error
from launcher.config.compose import compose
from launcher.run_files.journal import Record, number_of
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.run_log import last_end, written_steps
from scripts.faults.broken_reward import VARIABLE

PRESET = "conf=arithmetic_cpu"
FIRST_STEP_S = 600.0
END_S = 1800.0
LOOK_S = 0.1
ENDS = ("run.errored", "run.aborted")
LAST_LINES = 4

Driver = subprocess.Popen[bytes]
T = TypeVar("T")


@contextlib.contextmanager
def started(
    words: Sequence[str], paths: RunPaths, *, module: str = "launcher", variables: Mapping[str, str] | None = None
) -> Iterator[Driver]:
    """The run, its output in `{fileroot}/console.log`; killed with the block if it has not ended. `variables`: of its
    environment, besides this process's own."""
    fileroot = paths.fileroot
    fileroot.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, VARIABLE: str(fileroot / "reward_switch.json"), **(variables or {})}
    with console_of(paths).open("ab") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words], env=environment, stdout=console, stderr=console
        )
        print(f"pid {process.pid}: python -m {module} {' '.join(words)}", flush=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                left = descendants(process.pid)  # without its keeper the driver would save first
                process.kill()
                process.wait()
                for one in left:
                    send(one, signal.SIGKILL)


@contextlib.contextmanager
def short_lived(
    settings: Sequence[str], *, module: str = "launcher", variables: Mapping[str, str] | None = None
) -> Iterator[tuple[RunPaths, Driver]]:
    """A run of the preset in a folder that is gone with the block."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        words = [PRESET, f"cluster.fileroot={folder}", *settings]
        paths = RunPaths.of(compose(words))
        with started(words, paths, module=module, variables=variables) as process:
            yield paths, process


def until_finished(process: Driver, paths: RunPaths) -> None:
    """Raises RunError where it does not finish."""
    if process.wait():
        raise ended_early(process, paths)


def ended_early(process: Driver, paths: RunPaths) -> RunError:
    """Why a run ended that should not have, in its own words, and where it has written more."""
    # where comes first: a long reason is cut in a table
    where = f"its output is {console_of(paths)}, its logs lie beside it"
    return RunError(f"the run ended with exit code {process.poll()} ({where}): {own_words(paths)}")


def own_words(paths: RunPaths) -> str:
    """The reason that a run wrote down at its end; else the error that it printed, else its last lines."""
    end = last_end(paths)
    if end is not None and end["event"] in ENDS and end.get("reason"):
        return str(end["reason"])
    output = console_of(paths).read_text(errors="replace")
    if (printed := printed_error(output)) is not None:
        return HINT.join(filter(None, printed))
    return " ".join(output.split("\n")[-LAST_LINES:])


def console_of(paths: RunPaths) -> Path:
    return paths.fileroot / "console.log"


def until(process: Driver, look: Callable[[], T | None], within_s: float, between_s: float = LOOK_S) -> T:
    """What `look` found. Raises RunError where the run ends before, or nothing comes for so long."""
    give_up_at = time.monotonic() + within_s
    while (found := look()) is None:
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise RunError(f"the run has ended, or nothing came of it within {within_s:g} s", "give it a quiet machine")
        time.sleep(between_s)
    return found


def committed(paths: RunPaths) -> int:
    """Steps that it has written down, those that were undone too."""
    return len(written_steps(paths))


def until_committed(process: Driver, paths: RunPaths, count: int) -> None:
    """Raises RunError where the run ends before, or takes no step for long."""
    try:
        until(process, lambda: committed(paths) >= count or None, FIRST_STEP_S)
    except RunError as error:
        said = f"the run took {committed(paths)} of {count} steps"
        raise RunError(said, f"see {console_of(paths)}") from error


def at_s(line: Record) -> float:
    """On the machine's own clock; 0 where the line does not say."""
    return number_of(line.get("monotonic"), 0.0)
