"""Reads what this machine has: GPUs from NVML, CPUs and memory within the container's limits, out-of-memory kills.

No torch, no Ray. Reading has no effect: no CUDA context is made, nothing is allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

from launcher.config.schema import RunConfig
from launcher.resources.gpus import Gpu, UnreadableGpu, find_gpus, gpu_of, nvml, read_text
from launcher.resources.placement import NodeResources, gpus_needed, node_name

HOST_MEMORY = "host memory"
CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
OWN_CGROUP = PROC / "self" / "cgroup"
OOM_KILL = "oom_kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`memory` and `memory_free` are the host's in bytes, within the cgroup's limit; `no_gpu`: why there is none.

    Of one node; `n_nodes` like it are described together (`hardware.*`), and found is one. `is_unusable`: there is an
    accelerator, and no run can use it.
    """

    gpus: tuple[Gpu, ...]
    cpus: int
    memory: int
    memory_free: int
    no_gpu: str = ""
    n_nodes: int = 1
    is_described: bool = False
    is_unusable: bool = False

    def nodes(self, config: RunConfig) -> tuple[NodeResources, ...]:
        """For the placement. On a local cluster CPUs are no limit: Ray is given as many as the run reserves."""
        at_most = config.cluster.n_gpus_per_node
        gpus = len(self.gpus) if at_most is None else min(len(self.gpus), at_most)
        cpus = math.inf if config.cluster.address == "local" or not self.is_described else float(self.cpus)
        return tuple(NodeResources(name=node_name(number), gpus=gpus, cpus=cpus) for number in range(self.n_nodes))


def find_hardware() -> Hardware:
    """This machine, as this process may use it."""
    found = find_gpus()
    host = psutil.virtual_memory()
    limit, used = cgroup_memory()
    return Hardware(
        gpus=found.gpus,
        cpus=usable_cpus()[0],
        memory=int(min(host.total, limit)),
        memory_free=int(min(host.available, max(0, limit - used))),
        no_gpu=found.none,
        is_unusable=found.is_unusable,
    )


def planned_hardware(config: RunConfig, found: Hardware) -> Hardware:
    """The machine to plan for: `hardware.*` where given, else as found.

    Described are `cluster.n_nodes` nodes with `cluster.n_gpus_per_node` GPUs each, or with what the run needs on one.
    Nodes that are not described are taken to be like this machine, and no run is refused for that.
    """
    described = config.hardware
    host = found.memory if described.memory_gib_per_node is None else int(described.memory_gib_per_node * 2**30)
    cpus = found.cpus if described.n_cpus_per_node is None else described.n_cpus_per_node
    if described.gpu_memory_gib is None:
        same = (host, cpus) == (found.memory, found.cpus)
        if same and config.cluster.n_nodes == 1:
            return found
        n_nodes = config.cluster.n_nodes
        return dataclasses.replace(found, memory=host, cpus=cpus, n_nodes=n_nodes, is_described=not same)
    memory = int(described.gpu_memory_gib * 2**30)
    gpu = Gpu(name=described.gpu_name or "GPU", memory=memory, free=memory)
    per_node = config.cluster.n_gpus_per_node
    if per_node is None:
        per_node = math.ceil(gpus_needed(config) / config.cluster.n_nodes)
    return dataclasses.replace(
        found,
        gpus=(gpu,) * per_node,
        cpus=cpus,
        memory=host,
        no_gpu="" if per_node else "none is described (cluster.n_gpus_per_node=0)",
        is_unusable=False,
        n_nodes=config.cluster.n_nodes,
        is_described=True,
    )


def of_the_run(config: RunConfig, found: Hardware) -> Hardware:
    """The hardware to check a run against: this machine; for a cluster elsewhere, what `hardware.*` describes."""
    return found if config.cluster.address == "local" else planned_hardware(config, found)


def device_for(setting: str, hardware: Hardware) -> str:
    """`cuda` or `cpu` for a `device` setting: `auto` takes a GPU where there is one."""
    if setting != "auto":
        return setting
    return "cuda" if hardware.gpus else "cpu"


def cgroup_memory(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> tuple[float, float]:
    """(limit, used) in bytes of the tightest memory cgroup around this process; (inf, 0) without one. Cached files,
    which make room for whoever needs it, are not used.

    Version 2 (`memory.max`, and `memory.high`, above which the kernel slows a process down until it is useless) and
    version 1 (`memory.limit_in_bytes`); any ancestor may be the tightest.
    """
    found = [
        *(_limit(folder, name, "current", "") for folder in _folders_v2(root, own) for name in ("max", "high")),
        *(_limit(folder, "limit_in_bytes", "usage_in_bytes", "total_") for folder in _folders_v1(root, own)),
    ]
    return min(found, default=(math.inf, 0.0))


def _limit(folder: Path, limit_name: str, usage_name: str, prefix: str) -> tuple[float, float]:
    """The cgroup counts cached files as used, which the kernel keeps only for as long as nobody needs the room."""
    limit = read_text(folder / f"memory.{limit_name}")
    if not limit.isdigit():
        return math.inf, 0.0
    counters = _counters(folder / "memory.stat")
    cached = sum(counters.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return float(limit), float(read_text(folder / f"memory.{usage_name}") or 0) - cached


def usable_cpus(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> tuple[int, str]:
    """How many CPUs this process may use at once, at least one, and what limits them; "" where nothing does.

    The set of CPUs (a cpuset, `taskset`), and the time that a cgroup may take of them (`docker --cpus`, a Kubernetes
    limit), in version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`); any ancestor may be the tightest.
    """
    there, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    limits = [(float(allowed), f"{allowed} of {there} CPUs are open to this process (cpuset or taskset)")]
    for folder in _folders_v2(root, own):
        words = read_text(folder / "cpu.max").split()
        limits += _quota(folder / "cpu.max", *words) if len(words) == 2 else ()
    for folder in _folders_v1(root, own, "cpu"):
        period = read_text(folder / "cpu.cfs_period_us").strip()
        limits += _quota(folder / "cpu.cfs_quota_us", read_text(folder / "cpu.cfs_quota_us").strip(), period)
    least, why = min(limits)
    return max(1, int(least)), why if least < there else ""


def _quota(file: Path, quota: str, period: str) -> list[tuple[float, str]]:
    """The limit that a file sets; none for `max` and -1."""
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return []
    cpus = int(quota) / int(period)
    return [(cpus, f"{file} allows the time of {cpus:g} CPUs")]


def room_for_processes(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUP) -> tuple[float, str]:
    """How many processes and threads may still be started here, and what limits them; (inf, "") without a limit.

    The kernel counts each thread: of the cgroup, and, but for root, of the account on this machine.
    """
    found = [(math.inf, "")]
    for folder in (*_folders_v2(root, own), *_folders_v1(root, own, "pids")):
        limit = read_text(folder / "pids.max")
        if limit.isdigit():
            found.append((int(limit) - int(read_text(folder / "pids.current") or 0), f"{folder}/pids.max is {limit}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() and soft != resource.RLIM_INFINITY:
        found.append((soft - _threads_of(os.getuid()), f"ulimit -u is {soft}"))
    return min(found)


def _threads_of(account: int) -> int:
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended since
            count += process.num_threads() if process.uids().real == account else 0
    return count


def _folders_v2(root: Path, own: Path) -> Iterator[Path]:
    """The cgroup that `own` names, and those around it."""
    lines = read_text(own).splitlines()
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = root / path.strip("/")
    while folder.is_relative_to(root):
        yield folder
        folder = folder.parent


def memory_folders_v1(pid: int) -> Iterator[Path]:
    """The memory cgroup of a process and those around it; some may not be there."""
    return _folders_v1(CGROUP_ROOT, PROC / str(pid) / "cgroup")


def _folders_v1(root: Path, own: Path, controller: str = "memory") -> Iterator[Path]:
    """In a container the mounted root is its own, whatever its path is. Controllers that share a root are its name,
    `cpu,cpuacct`; a link for each alone is usual, and may not be there."""
    lines = [line.split(":", 2) for line in read_text(own).splitlines()]
    found = next((words[1:] for words in lines if len(words) == 3 and controller in words[1].split(",")), None)
    together, path = found or (controller, "/")
    mounted = next((root / name for name in (controller, together) if (root / name).is_dir()), root / controller)
    folder = mounted / path.strip("/")
    while folder.is_relative_to(mounted):
        yield folder
        folder = folder.parent


def oom_kills(pid: int | None = None, *, root: Path = CGROUP_ROOT, proc: Path = PROC) -> tuple[Path, int]:
    """How many processes the kernel has killed for want of memory so far, and where that is counted.

    In the cgroup of `pid`, None: this process; else on the host. Two counts compare where they are of the same file:
    a process may be moved. Version 1 counts a kill in the cgroup of who was killed and in none around it.
    """
    own = proc / ("self" if pid is None else str(pid)) / "cgroup"
    files = [next(_folders_v2(root, own)) / "memory.events"]
    files += [folder / "memory.oom_control" for folder in _folders_v1(root, own)]
    files.append(proc / "vmstat")
    counted_in = next((file for file in files if OOM_KILL in _counters(file)), files[-1])
    return counted_in, oom_kills_in(counted_in)


def oom_kills_in(file: Path) -> int:
    """0 where the file is gone, with its cgroup."""
    return _counters(file).get(OOM_KILL, 0)


class OomKillWatch:
    """Detects whether the kernel has killed a process for lack of memory lately. Check it when a process has ended.

    It counts from the sample before the last: a sample may fall between the kill and the report of it. Where the
    kernel counts for each cgroup, the count is that of the observed process, which may be moved to another one.
    """

    def __init__(self) -> None:
        self._file, count = oom_kills()
        self._counts = count, count

    def note_count(self, pid: int | None = None) -> None:
        """While `pid` is alive; None: this process."""
        file, count = oom_kills(pid)
        self._counts = (self._counts[1], count) if file == self._file else (count, count)
        self._file = file

    def risen(self) -> int:
        """How many it has killed since."""
        return max(0, oom_kills_in(self._file) - self._counts[0])


def _counters(file: Path) -> dict[str, int]:
    """Of lines like `oom_kill 3`."""
    words = (line.split() for line in read_text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def memory_in_use() -> dict[str, tuple[float, float]]:
    """Bytes used, and bytes there are, of the host and of each GPU of the node, whoever uses them."""
    host = psutil.virtual_memory()
    limit, used = cgroup_memory()
    in_use = {HOST_MEMORY: (used, limit) if limit < host.total else (host.total - host.available, host.total)}
    with contextlib.suppress(pynvml.NVMLError), nvml() as count:  # no driver
        for index in range(count):
            with contextlib.suppress(UnreadableGpu):  # it has fallen off the bus: the others have not
                gpu = gpu_of(index)
                in_use[f"GPU {index} memory"] = (float(gpu.memory - gpu.free), float(gpu.memory))
    return in_use
