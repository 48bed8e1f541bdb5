"""Faults of the trainer: killed at a moment (T1), stopped (T2, X-gc).

A named moment is verified: the trainer is stopped first, inspected, and killed only if it is at that moment.

    rollout backward optimizer   by its Python stack (py-spy, without pausing it: it is stopped already)
    publish save                 by the folder that is staged meanwhile
    saved                        by the checkpoint that has just appeared

A look takes about 0.1 s in which the trainer is stopped; between two looks it runs, shortly before the moment in small
slices.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.processes.process_tree import Process, identify
from launcher.checkpoints.in_memory_checkpoints import memory_folder
from launcher.run_files.run_paths import RunPaths
from scripts.faults.declaration import ANY, UNTIL_REPLACED, FaultContext, Figures, Option, fault, seconds
from scripts.faults.signals import Missed, hold, kill, resume, stop
from scripts.run_processes import title
from scripts.run_stacks import py_spy

MOMENTS = (ANY, "rollout", "backward", "optimizer", "publish", "save", "saved")
RANDOM_MOMENT_S = 3.0
"""T1 at any moment waits for up to this long first, so that the moment isn't always the same one of a step."""
STAGED = ".staging-"
FRAMES = (
    ("save", "save", "checkpointing.py"),
    ("publish", "publish", "training_servers.py"),
    ("optimizer", "commit", "policy_model.py"),
    ("backward", "compute_gradients", "policy_model.py"),
    ("rollout", "collect", "rollout_engine.py"),
)
"""The moment, and the function in whose frame the step loop's thread is then."""
SLICES_S: Mapping[tuple[str, str], float] = {("backward", "optimizer"): 0.002, ("rollout", "backward"): 0.05}
"""How long it runs until the next look, where (the moment it is in, the moment wanted) follow on each other."""
SLICE_S = 0.2
DUMP_TIMEOUT_S = 20.0
POLL_S = 0.0005


@fault(
    "T1",
    "trainer killed: SIGKILL at a moment that its own stack or files prove",
    role="trainer",
    moment=Option(ANY, "any: a random one; saved: right after a save", MOMENTS),
)
def kill_trainer(context: FaultContext) -> Figures:
    trainer, moment = context.trainer(), context.word("moment")
    if moment == ANY:
        context.sleep(context.draw.uniform(0.0, RANDOM_MOMENT_S))
        return {"target": "trainer", "moment": moment, "doing": title(trainer), **kill([trainer])}
    proof = catch(trainer, moment, context.paths, within_s=context.within_s, sleep=context.sleep)
    return {"target": "trainer", "moment": moment, "proof": proof, "pids": [trainer.pid]}


@fault("T2", "trainer hangs: SIGSTOP", role="trainer", seconds=UNTIL_REPLACED)
@fault(
    "X-gc", "trap: the trainer pauses, as in a garbage collection", role="trainer", seconds=seconds(1.5, "of the pause")
)
def stop_trainer(context: FaultContext) -> Figures:
    return {"target": "trainer", **hold([context.trainer()], context.number("seconds"), context.sleep)}


# ── a named moment ──


def moment_of(threads: Sequence[Mapping[str, Any]]) -> str:
    """Which moment a dump of py-spy shows; empty for none of them."""
    frames = {(frame["name"], Path(frame["filename"]).name) for thread in threads for frame in thread["frames"]}
    return next((moment for moment, function, file in FRAMES if (function, file) in frames), "")


def catch(process: Process, moment: str, paths: RunPaths, *, within_s: float, sleep: Callable[[float], None]) -> str:
    """SIGKILL at that moment; returns the evidence. Raises Missed where it didn't come within that time."""
    deadline = time.monotonic() + within_s
    if moment in {"save", "saved", "publish"}:
        return _catch_by_files(process, moment, paths, deadline)
    return _catch_by_stack(process, moment, deadline, sleep)


def _catch_by_stack(process: Process, moment: str, deadline: float, sleep: Callable[[float], None]) -> str:
    seen = ""
    while time.monotonic() < deadline:
        sleep(SLICES_S.get((seen, moment), SLICE_S))
        stop([process])
        killed = False
        try:
            seen = moment_of(dump(process))
            if seen == moment:
                kill([process])
                killed = True
                return f"its stack was in {seen}"
        finally:
            if not killed:
                resume([process])
    raise _missed(process, moment)


def _catch_by_files(process: Process, moment: str, paths: RunPaths, deadline: float) -> str:
    folder = memory_folder(paths, "weights") if moment == "publish" else paths.default_checkpoints
    begin = {"save": STAGED, "saved": "epoch", "publish": ".v"}[moment]
    before = set(_names(folder, begin))
    while time.monotonic() < deadline and identify(process.pid) == process:
        if new := set(_names(folder, begin)) - before:
            stop([process])
            if there := new & set(_names(folder, begin)):
                kill([process])
                return f"{min(there)} was there"
            resume([process])  # it was over before the process stopped
        time.sleep(POLL_S)
    raise _missed(process, moment)


def _missed(process: Process, moment: str) -> Missed:
    why = "did not come in time" if identify(process.pid) == process else "did not come before it ended by itself"
    return Missed(f"the moment {moment!r} {why}", "give it longer with --within")


def _names(folder: Path, begin: str) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir() if entry.name.startswith(begin)]
    except FileNotFoundError:
        return []


def dump(process: Process) -> list[dict[str, Any]]:
    """The Python stacks of a stopped process. Raises Missed where they can't be read."""
    words = [py_spy(), "dump", "--nonblocking", "--json", "--pid", str(process.pid)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False)
        threads: list[dict[str, Any]] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise Missed("py-spy can't read the trainer's stack", "run it as the same user, or as root") from error
    return threads
