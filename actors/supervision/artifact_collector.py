"""Keeps a folder for each incident (actors/supervision/incident_artifacts.py) during the repair.

A hang is looked at before it is repaired: ending the process would end the evidence. For that a repair waits EVIDENCE_S
at most; for everything else it waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import psutil

from actors.supervision.incident_artifacts import collect, open_folder
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
