"""The evidence of an incident, kept for a person: `incidents/<n>/` beside the run's logs.

    server-<i>.log.tail    the last lines of each server's log; trainer.log.tail likewise
    stacks/<name>.txt      of a hang: what each process was doing, by py-spy
    memory.json            host, cgroup, GPUs, and each process
    batch-<id>.json        each batch that was rejected for it (actors/training/rejections.py)
    incident.json          what happened; written again when it has ended

Everything has a bound in bytes and in seconds, and nothing here raises: evidence must never cost the run. Each file
appears complete, and one that exists is left alone: after a Coordinator that was killed meanwhile, the next one adds
what is missing.

A hang is looked at before it is repaired: ending the process would end the evidence. For that a repair waits EVIDENCE_S
at most; for everything else it waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import psutil

from actors.serving.server_log_tail import tail
from launcher.base.durable import replace_file
from launcher.base.messages import Cause, Rejection
from launcher.policy.actions import Action, RestartServer, RestartTrainer
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

EVIDENCE_S = 2.0
CLOSE_S = 5.0
OF_A_HANG = frozenset({Cause.SERVER_HANG, Cause.TRAINER_HANG})
MOST_PROCESSES = 8
"""Of one tree that are looked at."""

log = logging.getLogger("incidents")


class ArtifactCollector:
    """`pids`: the main process of each server and of the trainer, by name, as they are now. Used on one loop.

    `began`, `joined` and `ended` return at once and never raise. What they start for one incident runs in their order.
    """

    def __init__(self, paths: RunPaths, *, pids: Callable[[], Mapping[str, int]]) -> None:
        self._paths = paths
        self._pids = pids
        self._last: dict[int, asyncio.Task[None]] = {}
        self._hangs: dict[str, asyncio.Task[None]] = {}

    def began(self, number: int, event: Mapping[str, object]) -> None:
        """Gather the evidence; after a Coordinator that was killed while it did, what is still missing."""
        task = self._start(number, self._gather(number, event))
        if event.get("cause") in OF_A_HANG:
            self._hangs[str(event.get("subject"))] = task

    def joined(self, number: int, rejection: Rejection) -> None:
        """Move the rejected batch into the folder."""
        if rejection.file:
            file = Path(rejection.file)
            move = asyncio.to_thread(file.rename, self._paths.incident(number) / f"batch-{file.stem}.json")
            self._start(number, move)

    def ended(self, number: int, facts: Mapping[str, object]) -> None:
        self._start(number, asyncio.to_thread(_rewrite, self._paths, number, facts))

    async def evidence_before(self, action: Action) -> None:
        """Wait for the stacks of what `action` is about to end, EVIDENCE_S at most."""
        match action:
            case RestartServer(name=name):
                hang = self._hangs.pop(name, None)
            case RestartTrainer():
                hang = self._hangs.pop("trainer", None)
            case _:
                return
        if hang is not None:
            await asyncio.wait([hang], timeout=EVIDENCE_S)

    async def close(self) -> None:
        """Let what is being written be written, CLOSE_S at most."""
        if self._last:
            _, late = await asyncio.wait(self._last.values(), timeout=CLOSE_S)
            for task in late:
                task.cancel()

    def _start(self, number: int, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        task = self._last[number] = asyncio.create_task(self._after(self._last.get(number), number, work))
        return task

    async def _after(
        self, before: asyncio.Task[None] | None, number: int, work: Coroutine[object, object, object]
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            await work
        except Exception as error:  # noqa: BLE001 - evidence must never cost the run
            log.warning("incident.not_kept number=%d reason=%r", number, error)
        finally:
            work.close()  # cancelled before it began
            if self._last.get(number) is asyncio.current_task():
                del self._last[number]

    async def _gather(self, number: int, event: Mapping[str, object]) -> None:
        subject, known = str(event.get("subject")), self._pids()
        mine = {subject: known[subject]} if subject in known else {}
        is_hang = event.get("cause") in OF_A_HANG
        stacks = await asyncio.to_thread(_family, mine, event.get("time")) if is_hang else {}
        await collect(self._paths, number, facts=event, logs=self._logs(subject), pids=known, stacks_of=stacks)

    def _logs(self, subject: str) -> dict[str, Path]:
        index = subject.removeprefix("server-")
        logs = {"trainer": self._paths.trainer_log}
        if index != subject and index.isdigit():
            logs[subject] = self._paths.server_log(int(index))
        return logs


def _family(mine: Mapping[str, int], began: object) -> dict[str, int]:
    """A process and its descendants, by a name for the file of each. One that was started since it `began` (unix
    seconds) has replaced the one that hung, and is not looked at.
    """
    found: dict[str, int] = {}
    for name, pid in mine.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if isinstance(began, float) and process.create_time() > began:
                continue
            found[name] = pid
            for child in process.children(recursive=True)[: MOST_PROCESSES - 1]:
                found[f"{name}.{child.pid}"] = child.pid
    return found


def _rewrite(paths: RunPaths, number: int, facts: Mapping[str, object]) -> None:
    replace_file(open_folder(paths, number) / "incident.json", encode(facts))


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
