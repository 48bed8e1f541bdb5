"""Starts another project's trainer in a process host, and looks at its process tree."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.cluster.fencing import raylet_pid
from actors.processes.exit_watch import process_ended
from actors.processes.hosted_process import HostedProcess, ProcessLaunch
from actors.processes.process_tree import (
    Process,
    command_line,
    descendants,
    dying_with,
    process_state,
    send,
    stat_fields,
)
from actors.serving.server_log_tail import size_of, tail
from launcher.adapters.trainer_adapter import TrainerCommand
from launcher.base.durable import replace_file
from launcher.base.errors import RunError
from launcher.policy.observation_history import STOPPED
from launcher.run_files.run_id import mark_in
from launcher.run_files.run_paths import RunPaths

OF_PYTHON_AND_THREADS = ("PYTHONPATH", "OMP_NUM_THREADS")
"""Ray and the host change these in their own processes; the command gets what its user had."""
MARK = "GRPO_TRAINER"
TREE_EVERY_S = 1.0
GONE_S = 0.5
MOST_SAID = 1000
MOST_NAMED = 2
"""Of the processes that one look misses: a worker may end with the server that it started, and either is the cause."""


def inherited() -> dict[str, str]:
    """Of the driver's environment, what the command is given again."""
    return {name: os.environ[name] for name in OF_PYTHON_AND_THREADS if name in os.environ}


def mark_of(paths: RunPaths) -> str:
    """The variable, with its value, in the environment of the command and of all that it starts."""
    return mark_in(paths.logs, MARK, paths.namespace)


async def start(
    command: TrainerCommand, paths: RunPaths, variables: Mapping[str, str], *, stop_s: float
) -> HostedProcess:
    """In a session of its own; ended with this process and with its raylet. Raises ServerError, and RunError
    where what it must not find can't be removed, or what it must find can't be written.

    `env` of coreutils changes into the folder and becomes the command: the host has a folder and a PYTHONPATH of
    its own. Other variables are not among its words, which the process list shows.
    """
    for path in (*command.removes, *command.writes):
        try:
            await asyncio.to_thread(_set, path, command.writes.get(path))
        except OSError as error:
            raise RunError(f"{path} can't be changed: {error.strerror}", "make its folder writable") from error
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given = {**variables, **command.variables}
    unset = [word for name in OF_PYTHON_AND_THREADS if name not in given for word in ("-u", name)]
    setting = [f"{name}={given[name]}" for name in OF_PYTHON_AND_THREADS if name in given]
    env = shutil.which("env") or "/usr/bin/env"
    raylet = raylet_pid()
    return await HostedProcess.launch(
        ProcessLaunch(
            command=(env, "-C", str(command.cwd), *unset, *setting, *command.words),
            environment={**own, **given},
            log=paths.trainer_log,
            mark=mark_of(paths),
            watch=(os.getpid(), *(() if raylet is None else (raylet,))),
            grace_s=stop_s,
        )
    )


def _set(path: Path, text: str | None) -> None:
    """Write a file, or remove what is there."""
    if text is not None:
        replace_file(path, text.encode())
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def kill(process: HostedProcess) -> None:
    """End the command and all below it, without its time to save, and at once: the kernel takes a while to free the
    memory of each. Its host ends what is begun meanwhile."""
    for one in descendants(process.host_pid):
        send(one, signal.SIGKILL)


async def run_to_end(command: TrainerCommand, paths: RunPaths) -> tuple[int | None, str]:
    """A short command, which ends with this process too; its exit code, and its last lines. Raises ServerError."""
    at = size_of(paths.trainer_log)
    process = await start(command, paths, {}, stop_s=1.0)
    try:
        ended = await process.wait_ended()
    finally:
        await process.end()
    return ended.exit_code, await said_since(paths, at)


async def said_since(paths: RunPaths, at: int) -> str:
    """The end of what was printed from a byte of the trainer's log on, in one line."""
    said = await asyncio.to_thread(tail, paths.trainer_log, at)
    return " ".join(said.split())[-MOST_SAID:]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLook:
    """`state`: T where any process of the tree is stopped, else that of the command. `cpu_s`: of all of them.
    `stopped_s`: CPU seconds of the ranks that are stopped, None where none is."""

    state: str | None
    cpu_s: float
    stopped_s: float | None = None


class TreeWatch:
    """The tree of one incarnation, read once in TREE_EVERY_S. `ranks`: those of its processes without which it can't go
    on. `lost`: which of them has ended while the command lives on, "" where none has: known after GONE_S, in which what
    it said arrives, and a command whose trainer is done ends by itself; at once after SIGKILL, which has no last
    words. `has_lost_all`: none is left."""

    def __init__(self, process: HostedProcess, is_trainer: Callable[[Sequence[str]], bool]) -> None:
        self._process = process
        self._is_trainer = is_trainer
        self.ranks: list[Process] = []
        self._lines: dict[Process, str] = {}
        self._killed: set[Process] = set()
        self._missed_at = math.inf
        self.lost = ""
        self.has_lost_all = False
        self._seen = TreeLook(state=None, cpu_s=0.0)
        self._seen_at = float("-inf")

    def look_at_tree(self) -> TreeLook:
        now = time.monotonic()
        if now - self._seen_at >= TREE_EVERY_S:
            tree = descendants(self._process.host_pid)
            looks = [process_state(one.pid) for one in tree]
            self._note_ranks(tree)
            state = STOPPED if any(letter == STOPPED for letter, _ in looks) else process_state(self._process.pid)[0]
            # A child that has ended takes its seconds with it.
            cpu_s = max(self._seen.cpu_s, sum(seconds for _, seconds in looks))
            of_ranks = [look for one, look in zip(tree, looks, strict=True) if one in self._lines]
            stopped = [seconds for letter, seconds in of_ranks if letter == STOPPED]
            stopped_s = sum(stopped) if stopped else None
            self._seen = TreeLook(state=state, cpu_s=cpu_s, stopped_s=stopped_s)
            self._seen_at = now
        gone = [rank for rank in self.ranks if not command_line(rank)]  # that of one that has ended is empty
        self.has_lost_all = len(gone) == len(self.ranks)
        # From the first look without it: the last one with it may be older than GONE_S, as where a disk is slow.
        self._missed_at = min(self._missed_at, now) if gone else math.inf
        if gone and (now - self._missed_at >= GONE_S or not self._killed.isdisjoint(gone)):
            named = sorted(gone, key=lambda rank: rank not in self._killed)[:MOST_NAMED]
            who = " and ".join(f"its process {rank.pid} has ended" for rank in named)
            lines = "; ".join(self._lines[rank] for rank in named)
            self.lost = f"{who}, and the command lives on ({lines})"
        return self._seen

    async def ended(self, rank: Process) -> None:
        """Returns when it has. How is read as soon as the kernel tells of it: once its parent has taken it, nobody
        knows any more."""
        if await process_ended(rank.pid) and dying_with(rank.pid) == -signal.SIGKILL:
            self._killed.add(rank)

    def _note_ranks(self, tree: Sequence[Process]) -> None:
        """Without workers that they forked, which have the command line of their parent: the host's children once that
        is gone. A process that ends has no command line for a moment, and still its children."""
        lines = {one.pid: command_line(one) for one in tree}
        for one in tree:
            if one not in self._lines and self._is_trainer(lines[one.pid]) and (fields := stat_fields(one.pid)):
                of_parent = lines.get(int(fields[1]))
                if of_parent and of_parent != lines[one.pid]:
                    self.ranks.append(one)
                    self._lines[one] = shlex.join(lines[one.pid])[:MOST_SAID]
