"""Faults of memory: limits a live trainer's memory so that its next step runs out of it (T6, T7).

How much is too little is measured first, over one full step: what the trainer holds between two steps, and at the most
within one. The limit is put between the two, while it is between steps, so that the step fails and not a thread
of a checkpoint. What a process has freed and kept is no help to it then, nor is it taken away: a step that finds room
there needs nothing new, and such a trainer is left alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from actors.processes.process_tree import PROC, Process, errors_file, open_files, open_pidfd
from actors.serving.server_log_tail import words_of_abort
from launcher.base.errors import UsageError
from launcher.base.messages import Cause
from launcher.policy.exit_cause import find_trainer_cause
from launcher.resources.hardware import memory_folders_v1, oom_kills_in
from launcher.run_files.run_paths import RunPaths
from scripts.faults.declaration import FaultContext, Figures, Inject, Option, fault, is_alive, seconds
from scripts.faults.run_progress import LiveProgress
from scripts.faults.signals import Missed
from scripts.run_processes import RunProcesses

MIB = 2**20
LEAST = 16 * MIB
"""Less than that is as much as a thread's stack or two: what would fail first is anybody's guess."""
LOOK_S = 0.01
NOTICED_S = 3.0
"""After a move to another cgroup: the run looks each second where the kernel counts its kills."""
NEAR_LEAST = 0.1
REMOVED_S = 5.0
GPU_FILES = "/dev/nvidia"
HOW_ON_A_GPU = "a run with actor.device=cpu has its steps' memory on the host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`taken`: what the trainer held at the most within it, beyond the least. `above`: beyond that, now. Bytes."""

    taken: int
    above: int


Limit = Callable[[int], int]
"""Let it have no more than so many bytes beyond what it holds now; the limit, bytes. Raises Missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`counts`: the line of /proc/PID/status that it limits. `hold`: the process can be limited within it, and is not
    any more behind it. `proof(kills, said)`: what shows that it ended of that, "" where nothing does, from what the
    trainer has said since and how many the kernel has killed in its cgroup, if it has one of its own."""

    counts: str
    hold: Callable[[Process, list[int]], AbstractContextManager[Limit]]
    proof: Callable[[int, list[str]], str]


def starve_trainer(way: Way) -> Inject:
    def inject(context: FaultContext) -> Figures:
        trainer, kills = context.trainer(), [0]
        logged_before, errors = _size(context.paths.trainer_log), errors_file(trainer.pid)
        with way.hold(trainer, kills) as limit:
            figures = _starve(context, trainer, way.counts, limit)
        said = [*_since(context.paths.trainer_log, logged_before), *words_of_abort(errors).splitlines()]
        if not (proof := way.proof(kills[0], said)):
            nothing = "the trainer ended under its limit, and nothing shows that it was of it"
            raise Missed(nothing, f"see {context.paths.trainer_log}")
        return {"target": "trainer", "pids": [trainer.pid], "proof": proof, **figures}

    return inject


def _starve(context: FaultContext, trainer: Process, counts: str, limit: Limit) -> Figures:
    """Until it has ended. No two steps take the same: where one fits under the limit, the next limit is of that one."""
    figures: Figures = {}
    room, until = 0, time.monotonic() + context.within_s
    while step := _between_steps(context, trainer, counts, until):
        if not figures:
            _refuse_too_little(step)
            until = time.monotonic() + context.number("seconds")
        room = int(step.taken * context.number("share"))
        figures = {"limit_bytes": limit(room - step.above), "room_bytes": room, "step_bytes": step.taken}
    if not figures:
        raise Missed("the trainer has not gone through a complete step in time", "give it longer with --within")
    if is_alive(trainer):
        raise Missed(f"the trainer survived with {room / MIB:.0f} MiB for a step", "give it less: share=0.2")
    return figures


def _refuse_too_little(step: Step) -> None:
    if step.taken < LEAST:
        raise Missed(
            f"a step takes {step.taken / MIB:.0f} MiB more than the trainer holds before it: the rest it finds in what "
            "it has freed and kept",
            "start the run with MALLOC_MMAP_THRESHOLD_=131072 in its environment, so that it gives back what it frees, "
            "or with larger batches and actor.mb_spec.max_tokens_per_mb",
        )


def _between_steps(context: FaultContext, trainer: Process, counts: str, until: float) -> Step | None:
    """Measure a step, from one commit to the next, and return when the trainer holds about as little as it did before.

    Where it doesn't within a further step, as after its first checkpoint, that one is measured in its place. None where
    the trainer has ended, or `until` (monotonic) has come.
    """
    progress = LiveProgress(context.paths)
    progress.refresh()
    begins = progress.steps + 1
    seen: list[int] = []
    while time.monotonic() <= until and is_alive(trainer):
        if progress.steps > begins + 1 or (progress.steps > begins and not seen):
            begins, seen = progress.steps, []
        now = _held(trainer, counts)
        if progress.steps == begins and now:
            seen.append(now)
        elif progress.steps > begins and now and now - min(seen) <= NEAR_LEAST * (max(seen) - min(seen)):
            return Step(taken=max(seen) - min(seen), above=now - min(seen))
        context.sleep(LOOK_S)
        progress.refresh()
    return None


def _held(process: Process, counts: str) -> int:
    """Bytes; 0 from the moment in which it gives it all back, a little before it has ended."""
    try:
        words = (PROC / str(process.pid) / "status").read_text().split()
        return int(words[words.index(f"{counts}:") + 1]) * 1024
    except (OSError, ValueError):
        return 0


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _since(file: Path, offset: int) -> list[str]:
    if not file.exists():
        return []
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read().decode(errors="replace").splitlines()


# ── T6: what it may write to, heap and mappings, as prlimit(2) counts it ──


@contextlib.contextmanager
def limited(process: Process, what: int, counts: str) -> Iterator[Limit]:
    """`what`: resource.RLIMIT_…, of what `counts` shows in /proc/PID/status. As before afterwards. Raises Missed."""
    descriptor = open_pidfd(process)  # held open: while it is, the pid can't become another's
    if descriptor is None:
        raise Missed(f"process {process.pid} has ended", "try again")
    try:
        before = resource.prlimit(process.pid, what)

        def limit(room: int) -> int:
            at_most = _held(process, counts) + room
            with contextlib.suppress(ProcessLookupError):  # it has just ended of the limit before
                resource.prlimit(process.pid, what, (at_most, before[1]))
            return at_most

        try:
            yield limit
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, what, before)
    except (ProcessLookupError, PermissionError) as error:
        raise Missed(f"the memory of process {process.pid} can't be limited: {error}", "as the same user?") from error
    finally:
        os.close(descriptor)


def _by_its_words(kills: int, said: list[str]) -> str:
    found = find_trainer_cause(said, None)
    return found.line if found.cause is Cause.TRAINER_OOM else ""


by_limit = Way(
    counts="VmData", hold=lambda process, kills: limited(process, resource.RLIMIT_DATA, "VmData"), proof=_by_its_words
)


# ── T7: a memory cgroup (version 1) for it alone, in which the kernel kills ──


@contextlib.contextmanager
def _hold_by_cgroup(process: Process, kills: list[int]) -> Iterator[Limit]:
    """Pages that it had before stay where they were counted: this cgroup counts what it takes from now on."""
    around = memory_cgroup(process)
    own = around / f"grpo-starved-{process.pid}"

    def limit(room: int) -> int:
        at_most = int((own / "memory.usage_in_bytes").read_text()) + room
        (own / "memory.limit_in_bytes").write_text(str(at_most))
        return at_most

    try:
        own.mkdir()
        (own / "cgroup.procs").write_text(str(process.pid))
        time.sleep(NOTICED_S)
        yield limit
    except OSError as error:
        raise Missed(f"{own} can't be used: {error.strerror}", "only root may make a cgroup") from error
    finally:
        kills[0] = oom_kills_in(own / "memory.oom_control")
        _remove(own, around)


def memory_cgroup(process: Process) -> Path:
    """Raises UsageError."""
    found = next((f for f in memory_folders_v1(process.pid) if (f / "memory.oom_control").exists()), None)
    if found is None or not os.access(found, os.W_OK):
        why = "there is no memory cgroup of version 1" if found is None else f"{found} may not be written to"
        raise UsageError(f"T7 makes a memory cgroup, and {why}", "T6 needs none")
    return found


def _remove(own: Path, around: Path) -> None:
    """Processes that are still alive go back to where they were. Raises Missed."""
    deadline = time.monotonic() + REMOVED_S
    while own.exists():
        with contextlib.suppress(OSError):  # the kernel's files don't take what they don't know any more
            (own / "memory.limit_in_bytes").write_text("-1")
            for pid in (own / "cgroup.procs").read_text().split():
                (around / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # busy while what was killed in it is being cleared away
            own.rmdir()
        if time.monotonic() > deadline:
            raise Missed(f"{own} can't be removed", "rmdir it when it is empty")
        time.sleep(LOOK_S)


by_cgroup = Way(
    counts="VmRSS",
    hold=_hold_by_cgroup,
    proof=lambda kills, said: f"the kernel killed it for memory (oom_kill {kills})" if kills else "",
)


def check_host_memory(kind: str, found: RunProcesses) -> None:
    """Raises UsageError where the memory of this trainer's steps is not on the host."""
    if found.trainer is not None and any(open_files(found.trainer.pid, GPU_FILES)):
        raise UsageError(f"{kind}: the trainer is on a GPU, whose memory can't be limited from outside", HOW_ON_A_GPU)


def check_cgroup(paths: RunPaths, found: RunProcesses) -> None:
    check_host_memory("T7", found)
    if found.trainer is not None:
        memory_cgroup(found.trainer)


SHARE = Option(0.5, "of what a step takes, it is left", least=0.01)
SECONDS = seconds(60.0, "for so long it may survive")
fault(
    "T6",
    "trainer out of memory: RLIMIT_DATA of its process, below what its next step needs",
    role="trainer",
    check=lambda paths, found: check_host_memory("T6", found),
    share=SHARE,
    seconds=SECONDS,
)(starve_trainer(by_limit))
fault(
    "T7",
    "trainer killed for memory: by the kernel, in a cgroup with less room than its next step needs",
    role="trainer",
    check=check_cgroup,
    share=SHARE,
    seconds=SECONDS,
)(starve_trainer(by_cgroup))
