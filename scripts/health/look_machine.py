"""The machine: GPUs and who holds their memory, the host's and the cgroup's memory, kills for want of it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pynvml

from actors.processes.process_tree import descendants
from launcher.diagnosis.health.finding import CheckResult, Finding
from launcher.diagnosis.health.judge_machine import GIB, KillsSeen, judge_kills, judge_memory
from launcher.resources.hardware import find_hardware, memory_in_use, oom_kills
from scripts.health.look_run import Subject

KERNEL_LOG = Path("/dev/kmsg")
KILLED = re.compile(r"Killed process (\d+) \(([^)]*)\)")
MOST_RECORDS = 100_000


def check_gpus(subject: Subject) -> list[Finding]:
    hardware = find_hardware()
    if not hardware.gpus:
        wanted = [key for key in ("sglang", "actor") if subject.view.setting(key, "device") == "cuda"]
        verdict = CheckResult.BAD if wanted else CheckResult.ABSENT
        said = f"{'.device and '.join(wanted)}.device is cuda, and " if wanted else "no GPU here: "
        return [Finding(check="gpu", subject="GPUs", verdict=verdict, said=said + hardware.no_gpu)]
    own = _own_pids(subject)
    pynvml.nvmlInit()
    try:
        return [_gpu(index, own) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:  # as of a GPU that has fallen off the bus
        return [Finding(check="gpu", subject="GPUs", verdict=CheckResult.BAD, said=f"NVML can't read them: {error}")]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, own: dict[int, str]) -> Finding:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    holders = []
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        held = int(process.usedGpuMemory or 0)
        holders.append({"pid": process.pid, "of": own.get(process.pid, "another"), "bytes": held})
    finding = judge_memory(f"GPU {index}", float(memory.used), float(memory.total))
    # SGLang takes its share at the start and keeps it: full is how a GPU should be.
    verdict = CheckResult.NOTE if any(holder["of"] == "another" for holder in holders) else CheckResult.OK
    said = finding.said + "".join(f"; {one['of']} ({one['pid']}) {one['bytes'] / GIB:.1f} GiB" for one in holders)
    facts = {**finding.facts, "processes": holders}
    return Finding(check="gpu", subject=f"GPU {index}", verdict=verdict, said=said, facts=facts)


def _own_pids(subject: Subject) -> dict[int, str]:
    """Of the run's processes, the name of whom each belongs to."""
    found = subject.processes
    if found is None:
        return {}
    pids = {process.pid: "the run" for process in descendants(found.driver.pid)}
    pids |= {process.pid: server.name for server in found.servers for process in server.tree}
    if found.trainer is not None:
        pids[found.trainer.pid] = "trainer"
    return pids


def check_memory(subject: Subject) -> list[Finding]:
    used, limit = memory_in_use()["host memory"]
    host = judge_memory("host memory", used, limit)
    mine: dict[str, int] = {}
    for pid, name in _own_pids(subject).items():
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            mine[name] = mine.get(name, 0) + psutil.Process(pid).memory_info().rss
    said = host.said + "".join(f"; {name} {rss / GIB:.1f} GiB" for name, rss in sorted(mine.items()))
    facts = {**host.facts, "rss_bytes": mine}
    return [
        Finding(check=host.check, subject=host.subject, verdict=host.verdict, said=said, facts=facts),
        _kills(subject),
    ]


def _kills(subject: Subject) -> Finding:
    view = subject.view
    return judge_kills(
        KillsSeen(
            kills=_kernel_kills(),
            count=oom_kills()[1],
            since=view.started_at,
            until=time.time() if subject.is_live is not False else view.ended_at,
            own_pids=view.pids | frozenset(_own_pids(subject)),
            ran_out=view.ran_out,
            deaths=view.deaths,
            is_live=subject.is_live is not False,
        )
    )


def _kernel_kills() -> tuple[tuple[float, int, str], ...] | None:
    """(unix time, pid, name) of each in the kernel's log; None where this user may not read it."""
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
            except BrokenPipeError:  # the kernel has overwritten what was to be read next: go on with what there is
                continue
            head, _, message = record.partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit():
                yield int(fields[2]) / 1e6, message.partition("\n")[0]
    finally:
        os.close(log)
