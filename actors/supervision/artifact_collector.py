"""Keeps a folder for each incident (actors/supervision/incident_artifacts.py), beside the repair and never in its way.

A hang is looked at before it is mended: ending the process would end the evidence. For that a repair waits EVIDENCE_S
at most; for everything else it waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import psutil

from actors.supervision.incident_artifacts import collect
from launcher.base.durable import replace_file
from launcher.base.messages import Cause, Rejection
from launcher.policy.actions import Action, RestartServer, RestartTrainer
from launcher.run_files.journal import encode
from launcher.run_files.run_paths import RunPaths

EVIDENCE_S = 2.0
CLOSE_S = 5.0
OF_A_HANG = frozenset({Cause.SERVER_HANG, Cause.TRAINER_HANG})
MOST_PROCESSES = 8
"""Of one tree that are looked at."""

log = logging.getLogger("incidents")


class ArtifactCollector:
    """`pids`: the main process of each server and of the trainer, by name, as they are now. Lives on one loop."""

    def __init__(self, paths: RunPaths, *, pids: Callable[[], Mapping[str, int]]) -> None:
        self._paths = paths
        self._pids = pids
        self._gathering: dict[int, asyncio.Task[None]] = {}
        self._hangs: dict[str, asyncio.Task[None]] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def began(self, number: int, event: Mapping[str, object]) -> None:
        """Gather what there is to see of it; for a Coordinator that was killed at it, what is missing yet."""
        subject = str(event.get("subject"))
        is_hang = event.get("cause") in OF_A_HANG
        task = asyncio.create_task(self._gather(number, event, subject, is_hang))
        self._gathering[number] = task
        if is_hang:
            self._hangs[subject] = task

    def joined(self, number: int, rejection: Rejection) -> None:
        """Put the batch that was turned away into the folder."""
        if rejection.file:
            self._write(self._move(number, Path(rejection.file)))

    def ended(self, number: int, facts: Mapping[str, object]) -> None:
        self._write(self._finish(number, facts))

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
        tasks = {*self._gathering.values(), *self._writing}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()

    async def _gather(self, number: int, event: Mapping[str, object], subject: str, is_hang: bool) -> None:
        try:
            known = dict(self._pids())
            mine = {subject: known[subject]} if subject in known else {}
            stacks = await asyncio.to_thread(_family, mine, event.get("time")) if is_hang else {}
            await collect(
                self._paths, number, facts=event, logs=self._logs(subject), pids=known | mine, stacks_of=stacks
            )
        except Exception as error:  # noqa: BLE001 - evidence must never cost the run
            log.warning("incident.not_kept number=%d reason=%r", number, error)

    def _logs(self, subject: str) -> dict[str, Path]:
        index = subject.removeprefix("server-")
        logs = {"trainer": self._paths.trainer_log}
        if index != subject and index.isdigit():
            logs[subject] = self._paths.server_log(int(index))
        return logs

    async def _move(self, number: int, file: Path) -> None:
        await self._gathered(number)
        await asyncio.to_thread(_move_into, file, self._paths.incident(number))

    async def _finish(self, number: int, facts: Mapping[str, object]) -> None:
        await self._gathered(number)
        self._gathering.pop(number, None)
        await asyncio.to_thread(_rewrite, self._paths.incident(number), facts)

    async def _gathered(self, number: int) -> None:
        task = self._gathering.get(number)
        if task is not None:
            await asyncio.wait([task])

    def _write(self, work: Coroutine[object, object, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)


def _family(mine: Mapping[str, int], began: object) -> dict[str, int]:
    """A process and its descendants, by a name for the file of each. One that was started since it `began` (unix
    seconds) has taken the place of the one that hung, and is not looked at.
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


def _move_into(file: Path, folder: Path) -> None:
    try:
        file.rename(folder / f"batch-{file.stem}.json")
    except OSError as error:
        log.warning("incident.no_batch folder=%s reason=%r", folder, error)


def _rewrite(folder: Path, facts: Mapping[str, object]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "incident.json", encode(facts))
    except OSError as error:
        log.warning("incident.not_closed folder=%s reason=%r", folder, error)
