"""Faults of a GPU's memory: a process is killed, and while it starts again another one holds what is free (C9, T8).

What starts again needs new memory, where a running process may find enough in what its allocator has kept. The other
process is there, with its CUDA context made, before the kill. It lets go as soon as the run has said that memory ran
out. Never run on a GPU yet (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from actors.processes.process_tree import Process, open_files
from launcher.base.errors import UsageError
from launcher.run_files.journal import number_of, read_events
from launcher.run_files.run_paths import RunPaths
from scripts.faults import signals
from scripts.faults.declaration import SERVER, FaultContext, Figures, Option, fault, seconds
from scripts.faults.memory_faults import GPU_FILES, MIB
from scripts.faults.signals import Missed
from scripts.run_processes import RunProcesses

HOLDER = """
import sys, time, torch
leave, held = int(sys.argv[1]), []
for gpu in range(torch.cuda.device_count()):
    torch.zeros(1, device=gpu)
print("ready", flush=True)
sys.stdin.readline()
while True:
    for gpu in range(torch.cuda.device_count()):
        room = torch.cuda.mem_get_info(gpu)[0] - leave
        if room > leave // 4:
            try:
                held.append(torch.empty(room, dtype=torch.uint8, device=gpu))
            except torch.OutOfMemoryError:
                pass  # less is left by now: the next look takes that
    time.sleep(0.05)
"""
"""Of all GPUs that it sees, from its first line of input until it is killed."""
LOOK_S = 0.1


@contextlib.contextmanager
def holder(leave: int, code: str = HOLDER) -> Iterator[Callable[[], None]]:
    """What is yielded makes it take all but `leave` bytes of each GPU; it is given back with the block."""
    command = [sys.executable, "-c", code, str(leave)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        wake = process.stdin

        def take() -> None:
            wake.write("\n")
            wake.flush()

        try:
            if process.stdout.readline().strip() != "ready":
                raise Missed("no process can take the GPU's memory", "its own message is above")
            yield take
        finally:
            process.kill()


def starve(context: FaultContext, target: str, processes: Sequence[Process]) -> Figures:
    """Kill them while the GPU is being filled, until the run says of `target` that memory ran out. Raises Missed."""
    with holder(int(context.number("leave_mib") * MIB)) as take:
        killed = signals.kill(processes)
        take()
        until = time.monotonic() + context.number("seconds")
        while not (proof := _ran_out(context.paths, target, since=float(killed["signalled_monotonic"]))):
            if time.monotonic() > until:
                raise Missed(f"{target} did not run out of memory in time", "give it longer, or less: leave_mib=128")
            context.sleep(LOOK_S)
    return {"target": target, "proof": proof, **killed}


def _ran_out(paths: RunPaths, target: str, since: float) -> str:
    events = (event for event in read_events(paths.events) if event["event"] == "memory.ran_out")
    found = (event for event in events if event.get("subject") == target and number_of(event.get("monotonic")) > since)
    return next((f"{event.get('ran_out')}: {event.get('reason')}" for event in found), "")


def check_gpu(kind: str, instead: str, found: RunProcesses) -> None:
    """Raises UsageError where the trainer is not on a GPU."""
    if found.trainer is not None and not any(open_files(found.trainer.pid, GPU_FILES)):
        raise UsageError(f"{kind}: this run is not on a GPU", f"{instead} takes the host's memory")


def _starved(
    code: str, whom: str, meant: Callable[[FaultContext], tuple[str, Sequence[Process]]], instead: str, **more: Option
) -> None:
    fault(
        code,
        f"{whom} out of GPU memory: killed, and another process holds what is free while it starts",
        role=whom,
        noticed_as=whom,
        needs="",
        check=lambda paths, found: check_gpu(code, instead, found),
        **more,
        leave_mib=Option(256.0, "of each GPU, free", least=16),
        seconds=seconds(180.0, "for so long the GPU is held at most"),
    )(lambda context: starve(context, *meant(context)))


def _server(context: FaultContext) -> tuple[str, Sequence[Process]]:
    server = context.server()
    return server.name, server.tree


_starved("C9", "server", _server, "C3", server=SERVER)
_starved("T8", "trainer", lambda context: ("trainer", [context.trainer()]), "T6")
