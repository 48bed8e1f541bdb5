"""The checks of one node, before anything is started: what is there, what is missing, and the command that repairs it.

One list for the pre-flight of a run, for the check of every node of a cluster (`actors/cluster/node_readiness.py`), and
for `python -m launcher doctor`. Looking makes nothing, imports neither torch nor SGLang, and asks nobody else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from launcher.base.errors import ResourceError
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED
from launcher.config.schema import RunConfig
from launcher.resources import toolchain
from launcher.resources.environment_checks import check_cpus, check_temporary_folders
from launcher.resources.gpu_checks import NodeCheck, Stops, check_gpus
from launcher.resources.hardware import room_for_processes
from launcher.resources.memory_estimate import GIB

LEAST_SHARED_MEMORY = GIB
"""What NCCL's own documentation has a container given; Docker's default is 64 MiB."""
LEAST_THREADS = 400
"""Processes and threads of `conf=arithmetic_cpu`: 395 at most, on two cores, with one server and a parked trainer (26
November 2026). Each further server takes about 85, and Ray more where there are more cores."""
LEAST_OF_A_NODE = 85
"""Of a node of a running cluster, where Ray is there already and nothing but one server may be placed."""
KEEPS_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
LOCAL_RANK = "LOCAL_RANK"
DEVICE_ORDER, AS_NVML = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
CACHES = (
    (("TRITON_CACHE_DIR", ""), ("TRITON_HOME", ".triton"), ("HOME", ".triton")),
    (("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"), ("HOME", ".cache/flashinfer")),
    (("TVM_FFI_CACHE_DIR", ""), ("HOME", ".cache/tvm-ffi")),
    (("SGLANG_CACHE_DIR", ""), ("HOME", ".cache/sglang")),
    (("SGLANG_DG_CACHE_DIR", ""), ("HOME", ".cache/deep_gemm")),
)
"""Where Triton, FlashInfer, tvm_ffi, SGLang and DeepGEMM keep what they compiled: by the first variable that is set."""
SGLANG = SpecifierSet(">=0.5.17,<0.5.18")
"""As pyproject.toml requires it. 0.5.23 takes tensors in sessions and counts a part's tokens otherwise."""
OFF = frozenset({"", "0", "false", "False"})
AGAIN = "pip install -c constraints.txt -e ."


def check_node(*, least_threads: int = LEAST_THREADS) -> tuple[NodeCheck, ...]:
    """All of them, of this machine as this process may use it. `least_threads`: what will be started here takes."""
    return (
        *check_packages(),
        *check_gpus(torch_build()[0]),
        *check_tools(os.environ),
        check_caches(os.environ),
        *check_variables(os.environ),
        *check_temporary_folders(),
        check_cpus(),
        check_shared_memory(),
        check_processes(*room_for_processes(), least=least_threads),
    )


def missing_on_node(config: RunConfig, devices: Sequence[str], checks: Sequence[NodeCheck]) -> Iterator[ResourceError]:
    """What stops this run. `devices`: the servers' and the trainer's."""
    stops = {Stops.EVERY}
    if "cuda" in devices:
        stops.add(Stops.GPU)
        if min(config.sglang.gpu_fraction, config.actor.gpu_fraction) < 1:
            stops.add(Stops.SHARED)
        if max(config.sglang.tp_size * config.sglang.dp_size, config.actor.dp_size) > 1:
            stops.add(Stops.SEVERAL)
    return (check.error() for check in checks if check.stops in stops)


# ── packages ──


def check_packages() -> Iterator[NodeCheck]:
    """SGLang and torch: there, and of the versions that belong together."""
    sglang, torch = _version("sglang"), _version("torch")
    if sglang is None or torch is None:
        absent = " and ".join(name for name, version in (("sglang", sglang), ("torch", torch)) if version is None)
        yield NodeCheck(name="packages", seen=f"{absent} not installed", stops=Stops.EVERY, remedy=AGAIN)
        return
    cuda, rocm = torch_build()
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "no CUDA"
    pair = f"sglang {sglang} with torch {torch} ({build}), Python {'.'.join(map(str, sys.version_info[:3]))}"
    if not SGLANG.contains(sglang, prereleases=True):
        seen = f"{pair}: the launcher works with sglang{SGLANG} alone"
        yield NodeCheck(name="packages", seen=seen, stops=Stops.EVERY, remedy=AGAIN)
    elif cuda is None:
        yield NodeCheck(name="packages", seen=f"{pair}: not a build for CUDA", stops=Stops.GPU, remedy=AGAIN)
    elif wanted := _not_met("sglang", "torch", torch):
        yield NodeCheck(name="packages", seen=f"{pair}: this SGLang requires torch{wanted}", remedy=AGAIN)
    else:
        yield NodeCheck(name="packages", seen=pair)


def torch_build() -> tuple[str | None, str | None]:
    """The versions of CUDA and of ROCm that torch was built for, as its own file says."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.exists() else ""
    cuda, rocm = (re.search(rf"^{name}\b[^=]*= *'([^']+)'", text, re.MULTILINE) for name in ("cuda", "hip"))
    return (cuda and cuda[1]), (rocm and rocm[1])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _not_met(package: str, other: str, version: str) -> str:
    """What `package` requires of `other`, where that is not met; else ""."""
    requirements = map(Requirement, importlib.metadata.requires(package) or ())
    for one in requirements:
        applies = one.marker is None or one.marker.evaluate({"extra": ""})
        if one.name == other and applies and not one.specifier.contains(version, prereleases=True):
            return str(one.specifier)
    return ""


# ── what compiles ──


def check_tools(inherited: Mapping[str, str]) -> Iterator[NodeCheck]:
    """SGLang's, FlashInfer's and Triton's kernels are compiled on the machine where they run, at their first use."""
    found = toolchain.find_toolkit(inherited)
    if why := toolchain.why_no_toolkit(inherited):
        given = next((f"unset {name}" for name in toolchain.VARIABLES if inherited.get(name)), "")
        remedy = f"{given}{' or ' if given else ''}pip install -c constraints.txt nvidia-cuda-nvcc"
        yield NodeCheck(name="CUDA toolkit", seen=why, stops=Stops.GPU, remedy=remedy)
    else:
        seen = str(found) if found else "none installed; the pip packages' own is used"
        yield NodeCheck(name="CUDA toolkit", seen=seen)
    header = toolchain.python_header()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for name, program, remedy in (
        ("ninja", toolchain.find_ninja(inherited), "pip install ninja"),
        ("C++ compiler", toolchain.find_compiler(inherited, "CXX", "c++"), "apt-get install g++"),
        ("C compiler", toolchain.find_compiler(inherited, "CC", "gcc", "clang", "cc"), "apt-get install gcc"),
        ("Python.h", str(header) if header.exists() else None, f"apt-get install python{version}-dev"),
    ):
        if program is None:
            yield NodeCheck(name=name, seen="not found", stops=Stops.GPU, remedy=remedy)
        else:
            yield NodeCheck(name=name, seen=program)


def check_caches(inherited: Mapping[str, str]) -> NodeCheck:
    """Without a place to write, a server ends in a PermissionError of one of the five at its first kernel."""
    folders = [_cache_folder(ways, inherited) for ways in CACHES]
    refused = [f"{folder}: can't be made" for folder in folders if not _may_be_made(folder)]
    if not refused:
        return NodeCheck(name="kernel caches", seen=", ".join(sorted({str(folder.parent) for folder in folders})))
    return NodeCheck(
        name="kernel caches",
        seen="; ".join(refused),
        stops=Stops.GPU,
        remedy="set HOME (docker -e HOME=/work/outputs), or TRITON_HOME and its like, to a folder that may be written",
    )


def _cache_folder(ways: Sequence[tuple[str, str]], inherited: Mapping[str, str]) -> Path:
    named = (Path(inherited[variable]).expanduser() / below for variable, below in ways if inherited.get(variable))
    return next(named, Path.home() / ways[-1][1])


def _may_be_made(folder: Path) -> bool:
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


# ── the surroundings ──


def check_variables(inherited: Mapping[str, str]) -> Iterator[NodeCheck]:
    """Variables that other launchers set, under which a process takes another GPU than Ray has given it."""
    if (value := inherited.get(KEEPS_GPUS, "")) not in OFF:
        seen = f"{KEEPS_GPUS}={value}: Ray leaves each process all GPUs, so that two take the same one"
        remedy = f"unset {KEEPS_GPUS}; on a cluster before `ray start`, on each node"
        yield NodeCheck(name="variables", seen=seen, stops=Stops.GPU, remedy=remedy)
    if (order := inherited.get(DEVICE_ORDER, AS_NVML)) != AS_NVML:
        seen = f"{DEVICE_ORDER}={order}: CUDA numbers the GPUs otherwise than NVML, by which memory is planned"
        yield NodeCheck(name="variables", seen=seen, stops=Stops.GPU, remedy=f"unset {DEVICE_ORDER}")
    if (rank := inherited.get(LOCAL_RANK)) is not None:
        seen = f"{LOCAL_RANK}={rank}, as under torchrun: each trainer rank would take GPU {rank}, which it may not see"
        remedy = f"unset {LOCAL_RANK}; start the launcher by itself, not under torchrun or srun --ntasks"
        yield NodeCheck(name="variables", seen=seen, stops=Stops.GPU, remedy=remedy)


def check_shared_memory(folder: Path = MEMORY_BACKED) -> NodeCheck:
    """Through it NCCL's processes of one node talk. What the weights need there is the run's own (missing_machine)."""
    try:
        room = shutil.disk_usage(folder)
    except OSError as error:
        seen, free = f"{folder}: {error.strerror}", 0
    else:
        free = room.free
        seen = f"{free / GIB:.2f} of {room.total / GIB:.2f} GiB free"
    if free >= LEAST_SHARED_MEMORY:
        return NodeCheck(name=str(folder), seen=seen)
    remedy = "docker: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium: Memory; else free some of it"
    need = f"{seen}; NCCL needs {LEAST_SHARED_MEMORY / GIB:g} GiB"
    return NodeCheck(name=str(folder), seen=need, stops=Stops.SEVERAL, remedy=remedy)


def check_processes(room: float, limit: str, *, least: int = LEAST_THREADS) -> NodeCheck:
    """Where no thread can be started, Ray aborts, each process of its own with a page of addresses."""
    if not limit:
        return NodeCheck(name="processes", seen="no limit")
    seen = f"room for {room:.0f} more processes and threads ({limit})"
    if room >= least:
        return NodeCheck(name="processes", seen=seen)
    need = f"{seen}; {least} are needed"
    remedy = "raise it (ulimit -u 8192; docker: --pids-limit=-1), or end other processes of this account"
    return NodeCheck(name="processes", seen=need, stops=Stops.EVERY, remedy=remedy)
