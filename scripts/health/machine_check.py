"""The machine: GPUs and which processes hold their memory, the memory of host and cgroup, and out-of-memory kills."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import psutil
import pynvml

from actors.processes.process_tree import descendants
from launcher.base.findings import Finding, Severity
from launcher.base.wording import counted
from launcher.resources.gpus import UnreadableGpu, handle_of, nvml
from launcher.resources.hardware import HOST_MEMORY, find_hardware, memory_in_use, oom_kills
from scripts.health.findings import ABSENT, BAD, NOTE, OK, UNKNOWN
from scripts.health.recorded_run import RecordedRun
from scripts.health.run_check import Subject

GIB = 2.0**30
MEMORY_BAD, MEMORY_NOTE = 0.95, 0.85
KERNEL_LOG = Path("/dev/kmsg")
KILLED = re.compile(r"Killed process (\d+) \(([^)]*)\)")
MOST_RECORDS = 100_000

Kill = tuple[float, int, str]
"""Unix time, pid and name of a process that the kernel killed for memory."""


def judge_memory(name: str, used: float, limit: float) -> Finding:
    share = used / limit if limit > 0 else 1.0
    verdict = BAD if share >= MEMORY_BAD else NOTE if share >= MEMORY_NOTE else OK
    text = f"{used / GIB:.1f} of {limit / GIB:.1f} GiB used ({share:.0%})"
    return Finding(name, text, verdict, facts={"used_bytes": used, "limit_bytes": limit})


def judge_kills(
    view: RecordedRun,
    kills: tuple[Kill, ...] | None,
    *,
    count: int,
    own_pids: Set[int],
    is_live: bool,
    now: float,
    has_all_pids: bool = True,
) -> Finding:
    """`kills`: None where the kernel's log can't be read. `count`: the kernel's own counter since boot. `has_all_pids`
    False: of its processes only those that live are known, and a killed one does not."""
    until = now if is_live else view.ended_at
    own = [kill for kill in kills or () if kill[1] in own_pids and kill[0] >= view.started_at]  # pids are used again
    others = [kill for kill in kills or () if view.started_at <= kill[0] <= until]
    verdict: Severity = OK
    text = "none while it ran" if kills is not None or not count else "none of this run's processes died"
    may_have_lost = view.deaths > 0 or not has_all_pids
    text += f" ({count} since boot)" if count else ""
    if own:
        _, pid, name = own[-1]
        verdict = NOTE if is_live else BAD
        text = f"the kernel killed {len(own)} of this run's processes for memory, the last one {name} (pid {pid})"
    elif view.ran_out:
        verdict = NOTE if is_live else BAD
        times = counted(len(view.ran_out), "time")
        text = f"memory ran out {times} in this attempt, the last time {view.ran_out[-1]}"
    elif others:
        _, pid, name = others[-1]
        unknown = "and it is not known whether of this run, whose ended ones nobody recorded"
        verdict = NOTE if has_all_pids else UNKNOWN
        text = f"{len(others)} while it ran, {'none of this run' if has_all_pids else unknown}: {name} (pid {pid})"
    elif kills is None and count and may_have_lost:
        verdict = UNKNOWN
        deaths = f"the journal has {counted(view.deaths, 'death')} of the run's processes"
        why = deaths if view.deaths else "nobody recorded which of the run's processes ended"
        text = f"{count} since boot; the kernel's log can't be read, and {why}"
    return Finding("kills for memory", text, verdict, facts={"oom_kill": count, "ran_out": view.ran_out})


def check_gpus(subject: Subject) -> list[Finding]:
    hardware = find_hardware()
    if not hardware.gpus:
        wanted = [key for key in ("sglang", "actor") if subject.view.setting(f"{key}.device") == "cuda"]
        text = f"{'.device and '.join(wanted)}.device is cuda, and " if wanted else "no GPU here: "
        verdict = BAD if wanted or hardware.is_unusable else ABSENT
        return [Finding("GPUs", text + hardware.no_gpu, verdict)]
    own = _own_pids(subject)
    try:
        with nvml() as count:
            return [_gpu(index, handle_of(index), own) for index in range(count)]
    except (pynvml.NVMLError, UnreadableGpu) as error:
        is_lost = isinstance(error, UnreadableGpu) or error.value == pynvml.NVML_ERROR_GPU_IS_LOST
        return [Finding("GPUs", f"NVML can't read them: {error}", BAD if is_lost else UNKNOWN)]


def _gpu(index: int, handle: Any, own: dict[int, str]) -> Finding:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    holders = [
        {"pid": one.pid, "of": own.get(one.pid, "another"), "bytes": int(one.usedGpuMemory or 0)}
        for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]
    finding = judge_memory(f"GPU {index}", float(memory.used), float(memory.total))
    # SGLang takes its share at the start and keeps it: full is how a GPU should be.
    verdict = NOTE if any(one["of"] == "another" for one in holders) else OK
    text = finding.text + "".join(f"; {one['of']} ({one['pid']}) {one['bytes'] / GIB:.1f} GiB" for one in holders)
    return Finding(finding.subject, text, verdict, facts={**finding.facts, "processes": holders})


def _own_pids(subject: Subject) -> dict[int, str]:
    """Of the run's processes, the name of whom each belongs to."""
    found = subject.processes
    if found is None:
        return {} if subject.areal is None else dict(subject.areal.names)
    pids = {process.pid: "the run" for process in descendants(found.driver.pid)}
    pids |= {process.pid: server.name for server in found.servers for process in server.tree}
    if found.trainer is not None:
        pids[found.trainer.pid] = "trainer"
    return pids


def check_memory(subject: Subject) -> list[Finding]:
    own, view = _own_pids(subject), subject.view
    host = judge_memory(HOST_MEMORY, *memory_in_use()[HOST_MEMORY])
    rss: dict[str, int] = {}
    for pid, name in own.items():
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            rss[name] = rss.get(name, 0) + psutil.Process(pid).memory_info().rss
    text = host.text + "".join(f"; {name} {held / GIB:.1f} GiB" for name, held in sorted(rss.items()))
    kills = judge_kills(
        view,
        _kernel_kills(),
        count=oom_kills()[1],
        own_pids=view.pids | set(own),
        has_all_pids=subject.areal is None,
        is_live=subject.may_be_live,
        now=time.time(),
    )
    return [dataclasses.replace(host, text=text, facts={**host.facts, "rss_bytes": rss}), kills]


def _kernel_kills() -> tuple[Kill, ...] | None:
    """Those in the kernel's log; None where this user may not read it."""
    booted_at = time.time() - time.monotonic()
    try:
        return tuple(
            (booted_at + seconds, int(match[1]), match[2])
            for seconds, line in _kernel_lines()
            if (match := KILLED.search(line))
        )
    except OSError:
        return None


def _kernel_lines() -> Iterator[tuple[float, str]]:
    """(seconds since boot, message)"""
    log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(log, 8192).decode(errors="replace")
            except BlockingIOError:  # its end
                return
            except BrokenPipeError:  # the kernel has overwritten what was to be read next: read on behind it
                continue
            head, _, message = record.partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit():
                yield int(fields[2]) / 1e6, message.partition("\n")[0]
    finally:
        os.close(log)
