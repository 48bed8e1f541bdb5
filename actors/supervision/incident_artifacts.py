"""The evidence of an incident, kept for a person: `incidents/<n>/` beside the run's logs.

    server-<i>.log.tail    the last lines of each server's log; trainer.log.tail likewise
    stacks/<name>.txt      of a hang: what each process was doing, by py-spy
    memory.json            host, cgroup, GPUs, and each process
    batch-<id>.json        each batch that was rejected for it (actors/training/rejections.py)
    incident.json          what happened; written again when it has ended

Everything has a bound in bytes and in seconds, and nothing here raises: evidence must never cost the run. Each file
appears complete, and one that exists is left alone: after a Coordinator that was killed meanwhile, the next one adds
what is missing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from actors.serving.server_log_tail import tail
from launcher.base.durable import replace_file
from launcher.resources.hardware import cgroup_memory, find_hardware
from launcher.run_files.journal import encode
from launcher.run_files.run_paths import RunPaths

DEADLINE_S = 20.0
DUMP_TIMEOUT_S = 8.0
MOST_DUMPS = 16
MOST_DUMP_BYTES = 256 * 1024
MOST_LOG_BYTES = 64 * 1024
MOST_FOLDERS = 200
_ONE_AT_A_TIME = threading.Lock()
"""Of one run; an incident beyond that is in the journal only, with its reason."""
PY_SPY = Path(sys.executable).with_name("py-spy")

log = logging.getLogger("incidents")


async def collect(
    paths: RunPaths,
    number: int,
    *,
    facts: Mapping[str, object],
    logs: Mapping[str, Path],
    pids: Mapping[str, int],
    stacks_of: Mapping[str, int] | None = None,
) -> Path | None:
    """Gather what there is within DEADLINE_S. Returns the folder, None where none could be made. Never raises.

    `logs` and `stacks_of` by the name that the file gets; `pids`: whose memory is listed. What fails leaves a line in
    `missing.txt`.
    """
    try:
        async with asyncio.timeout(DEADLINE_S):
            folder = await asyncio.to_thread(open_folder, paths, number)
    except OSError as error:  # TimeoutError is one: a disk that hangs
        log.warning("incident.no_folder number=%d reason=%r", number, error)
        return None
    missing: list[str] = []
    parts = {
        "incident": asyncio.to_thread(_keep, folder / "incident.json", lambda: encode(facts)),
        "logs": asyncio.to_thread(_keep_logs, folder, logs),
        "memory": asyncio.to_thread(_keep, folder / "memory.json", lambda: _memory(pids)),
        "stacks": _dump_stacks(folder / "stacks", stacks_of or {}),
    }
    tasks = {asyncio.create_task(work): name for name, work in parts.items()}
    _, late = await asyncio.wait(tasks, timeout=DEADLINE_S)
    for task, name in tasks.items():
        if task in late:
            task.cancel()
            missing.append(f"{name}: not done within {DEADLINE_S:g} s")
        elif (failure := task.exception()) is not None:
            missing.append(f"{name}: {type(failure).__name__}: {failure}")
    if missing:
        log.warning("incident.incomplete number=%d missing=%r", number, missing)
        await asyncio.gather(
            asyncio.to_thread(replace_file, folder / "missing.txt", "\n".join(missing).encode()), return_exceptions=True
        )
    return folder


def open_folder(paths: RunPaths, number: int) -> Path:
    """Raises OSError, also where there are too many."""
    paths.incidents.mkdir(parents=True, exist_ok=True)
    folder = paths.incident(number)
    with _ONE_AT_A_TIME:  # two threads that counted before either made its folder would make one too many
        if not folder.exists() and sum(1 for _ in paths.incidents.iterdir()) >= MOST_FOLDERS:
            raise OSError(f"{paths.incidents} has {MOST_FOLDERS} folders already")
        folder.mkdir(exist_ok=True)
    return folder


def _keep(file: Path, content: Callable[[], bytes]) -> None:
    if not file.exists():
        replace_file(file, content())


def _keep_logs(folder: Path, logs: Mapping[str, Path]) -> None:
    for name, path in logs.items():
        _keep(folder / f"{name}.log.tail", functools.partial(_last_bytes, path))


def _last_bytes(log: Path) -> bytes:
    return tail(log, 0).encode(errors="replace")[-MOST_LOG_BYTES:]


def _memory(pids: Mapping[str, int]) -> bytes:
    found = find_hardware()
    limit, used = cgroup_memory()
    return encode(
        {
            "time": time.time(),
            "host": {"total": found.memory, "free": found.memory_free},
            "cgroup": {"limit": limit, "used": used},
            "gpus": [{"name": gpu.name, "memory": gpu.memory, "free": gpu.free} for gpu in found.gpus],
            "no_gpu": found.no_gpu,
            "processes": {name: _process_memory(pid) for name, pid in pids.items()},
        }
    )


def _process_memory(pid: int) -> dict[str, object]:
    try:
        process = psutil.Process(pid)
        memory = process.memory_info()
        return {"pid": pid, "status": process.status(), "rss": memory.rss, "vms": memory.vms}
    except psutil.Error as error:
        return {"pid": pid, "error": type(error).__name__}


async def _dump_stacks(folder: Path, pids: Mapping[str, int]) -> None:
    if not pids:
        return
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    await asyncio.gather(*(_dump(folder / f"{name}.txt", pid) for name, pid in list(pids.items())[:MOST_DUMPS]))


async def _dump(file: Path, pid: int) -> None:
    """`--nonblocking`, so that no healthy process is stopped to be looked at; why it failed is written in its place."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(PY_SPY),
            "dump",
            "--nonblocking",
            "--pid",
            str(pid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:  # not installed, or no room for a process
        await asyncio.to_thread(_keep, file, f"{PY_SPY}: {error}\n".encode)
        return
    try:
        async with asyncio.timeout(DUMP_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        output = f"py-spy did not answer within {DUMP_TIMEOUT_S:g} s\n".encode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await asyncio.to_thread(_keep, file, lambda: output[:MOST_DUMP_BYTES])
