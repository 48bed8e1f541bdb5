"""Runs the default experiment as a user starts it, and keeps its output with the time of each line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.config.compose import compose
from launcher.run_files.run_paths import RunPaths

PRESET = "conf=arithmetic_cpu"
MARK = "GRPO_BENCHMARK_RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`began` is unix seconds at the command, `said` each line of output with the seconds since then."""

    began: float
    said: Sequence[tuple[float, str]]
    paths: RunPaths


def run_experiment(
    fileroot: Path,
    overrides: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str, str], None] | None = None,
    module: str = "launcher",
) -> Run:
    """Run `python -m module` to the end. `on_line(mark, line)` is called as each line comes.

    Raises RuntimeError where the run fails.
    """
    words = [PRESET, f"cluster.fileroot={fileroot}", *overrides]
    mark = f"{MARK}={uuid.uuid4().hex}"
    began = time.time()
    said: list[tuple[float, str]] = []
    with subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env={**os.environ, **(environment or {}), **dict([mark.split("=")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append((time.time() - began, line.rstrip()))
            if on_line is not None:
                on_line(mark, line)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n" + "\n".join(t for _, t in said))
    return Run(began=began, said=said, paths=RunPaths.of(compose(words)))


def cpu_seconds_of(mark: str) -> float:
    """Processor time of all living processes that bear the mark in their environment: Ray's are no children."""
    name, _, value = mark.partition("=")
    total = 0.0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value:
                times = process.cpu_times()
                total += times.user + times.system
    return total
