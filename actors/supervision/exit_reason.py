"""Finds why a process ended or hangs when it can't report that itself: from the kernel, from Ray, and from its log.

An allocation that fails in a step may fail in one of Ray's threads next, before anybody has heard of the step. And a
server whose memory ran out in one thread may leave the others waiting for ever: SGLang 0.5.17 on the CPU, seen: no room
for the thread that loads weights, `MemoryError` in the log, and the scheduler waits for that thread.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from actors.cluster.ray_oom_kills import killed_for_memory
from actors.processes.process_tree import errors_file
from actors.serving.server_log_tail import decisive_lines, tail, words_of_abort
from actors.supervision.trainer_states import ProcessId
from launcher.base.messages import Cause, Health
from launcher.policy.exit_cause import ExitFinding, find_server_cause, find_trainer_cause
from launcher.policy.observed import ServerFacts

READ_S = 2.0
"""Longest wait for a log on a disk that stalls."""


class TrainerExit:
    """Of a process of this machine that is alive yet. `log`: the trainer's."""

    def __init__(self, process: ProcessId, log: Path) -> None:
        self._process, self._log = process, log
        self._errors = errors_file(process.pid)

    async def find(self, oom_kills: int, *, since: int) -> ExitFinding:
        """Once it has ended. `oom_kills`: by the kernel, meanwhile. `since`: the byte of the log up to which all was
        well."""
        if oom_kills:
            return find_trainer_cause([], -signal.SIGKILL, oom_kills=oom_kills)
        killed = (await killed_for_memory(self._process.node, self._process.pid)).splitlines()
        said = await _read(lambda: f"{tail(self._log, since)}\n{words_of_abort(self._errors)}")
        return find_trainer_cause([*killed, *decisive_lines(said)], None)


class HangReasons:
    """Servers that were declared dead for a hang, and whose log shows that memory ran out. Each log is read once for an
    incarnation, by `read`. `log`: where a server's log is, by its name."""

    def __init__(self, log: Callable[[str], Path]) -> None:
        self._log = log
        self._found: dict[tuple[str, int], ExitFinding | None] = {}

    @property
    def has_unread(self) -> bool:
        return None in self._found.values()

    def explain(self, facts: ServerFacts, generation: int) -> ServerFacts:
        """The same, or out of memory in place of hung where its log shows that."""
        verdict = facts.verdict
        if verdict.health is not Health.DEAD or verdict.cause is not Cause.SERVER_HANG:
            return facts
        found = self._found.setdefault((facts.name, generation), None)
        if found is None or found.ran_out is None:
            return facts
        reason = f"{verdict.reason}; its log says: {found.line}"
        return replace(facts, verdict=replace(verdict, reason=reason, cause=found.cause), ran_out=found.ran_out)

    async def read(self) -> None:
        for (name, generation), found in list(self._found.items()):
            if found is None:
                text = part_of(await _read(partial(tail, self._log(name), 0)), generation)
                self._found[name, generation] = find_server_cause(decisive_lines(text), None)


async def _read(said: Callable[[], str]) -> str:
    try:
        async with asyncio.timeout(READ_S):
            return await asyncio.to_thread(said)
    except TimeoutError:
        return ""


def part_of(text: str, generation: int) -> str:
    """What one incarnation wrote; all of the text where its beginning is too long ago to be in it."""
    *_, part = re.split(rf"^==== generation {generation}, ", text, flags=re.MULTILINE)
    return part
