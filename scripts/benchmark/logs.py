"""Benchmark `logs`: how fast scripts/diagnose.py reads a made log in a separate process, and in how much memory.

The log is half of a run that learns, half of one whose server is gone: tables, and failed requests with their tokens.
The file was just written, so that it comes from the page cache as far as there is memory for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmark.made_data.made_logs import Made, RunMaker
from scripts.benchmark.measured import Measured

MEGABYTE = 1e6
ENDLESS = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the log that is made")
    parser.add_argument(
        "--log", choices=("trainer", "server"), default="trainer", help="the program whose log format is used"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder in which it is made, and removed afterwards; by default a temporary one"
    )


def run(arguments: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.folder) as folder:
        return measure(arguments.gigabytes, Path(folder), arguments.log)


def write_trainer_log(path: Path, size: int) -> int:
    """A trainer.log of `size` bytes at least; the step at which it begins to fail."""
    with path.open("w") as file:
        for written, onset, piece in _pieces(size):
            file.write(piece)
            if written >= size:
                return onset
    raise AssertionError("the pieces never end")


def _pieces(size: int) -> Iterator[tuple[int, int, str]]:
    healthy = RunMaker(Made(steps=ENDLESS, chatter=40))
    written, step = 0, 0
    while written < size / 2:
        for piece in healthy.step(step):
            written += len(piece.encode())
            yield written, step + 1, piece
        step += 1
    onset = step
    failing = RunMaker(Made(steps=ENDLESS, fails="crash", onset=onset, groups=64, payload_tokens=700, chatter=40))
    failing.now = healthy.now
    while True:
        for piece in failing.step(step):
            written += len(piece.encode())
            yield written, onset, piece
        step += 1


def write_server_log(path: Path, size: int) -> None:
    written = 0
    with path.open("w") as file:
        for piece in RunMaker(Made(steps=ENDLESS)).server(every_s=0.5):
            file.write(piece)
            written += len(piece)
            if written >= size:
                return


def measure(gigabytes: float, folder: Path, log: str) -> Measured:
    """Make the log, read it, remove it. `cpu_s`: processor time, which others on the machine don't change. `peak_mb`:
    the most memory that the process held. `onset`: as found, and as made."""
    path = folder / f"{log}.log"
    size, onset = int(gigabytes * 1e9), None
    try:
        if log == "trainer":
            onset = write_trainer_log(path, size)
        else:
            write_server_log(path, size)
        return _read(path, log, onset)
    finally:
        path.unlink(missing_ok=True)


SMALL = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
print(os.wait4(child.pid, 0)[2].ru_maxrss)
"""
"""The peak that the kernel tells of a process includes that of the one that forked it, which may be a large one."""


def _read(path: Path, log: str, onset: int | None) -> Measured:
    command = [sys.executable, "-m", "scripts.diagnose", str(path), "--json", "--no-progress"]
    begin = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", SMALL, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said, peak_kib = map(json.loads, process.stdout.read().rsplit("\n", 2)[:2])
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    seconds = time.perf_counter() - begin
    found = said["onset"]["step"] if said["onset"] else None
    megabytes = path.stat().st_size / MEGABYTE
    cpu_s = usage.ru_utime + usage.ru_stime
    figures = {
        "megabytes": megabytes,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "megabytes_per_s": megabytes / seconds,
        "peak_mb": peak_kib * 1024 / MEGABYTE,
    }
    points = {name: [value] for name, value in (figures | {"megabytes_per_cpu_s": megabytes / cpu_s}).items()}
    notes = [f"onset {found} (made: {onset})"]
    return Measured(points=points, notes=notes, raw={"log": log, **figures, "onset": found, "true_onset": onset})
