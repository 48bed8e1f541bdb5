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
from launcher.base.findings import Finding, Severity
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED
from launcher.config.schema import RunConfig
from launcher.resources import toolchain
from launcher.resources.environment_checks import check_cpus, check_temporary_folders
from launcher.resources.gpu_checks import check_gpus
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


def check_node(*, least_threads: int = LEAST_THREADS) -> tuple[Finding, ...]:
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


def missing_on_node(config: RunConfig, devices: Sequence[str], checks: Sequence[Finding]) -> Iterator[ResourceError]:
    """What stops this run. `devices`: the servers' and the trainer's."""
    stops = {Severity.BAD}
    if "cuda" in devices:
        stops.add(Severity.GPU)
        if min(config.sglang.gpu_fraction, config.actor.gpu_fraction) < 1:
            stops.add(Severity.SHARED)
        if max(config.sglang.tp_size * config.sglang.dp_size, config.actor.dp_size) > 1:
            stops.add(Severity.SEVERAL)
    return (check.error() for check in checks if check.level in stops)


def unknown_of_node(config: RunConfig, checks: Sequence[Finding]) -> str:
    """What could not be found out of this machine, in one line; "" where all was, and where the run is to be on a
    cluster that it joins: this machine may have no part in it. It stops no run."""
    if config.cluster.address != "local":
        return ""
    return "; ".join(str(check) for check in checks if check.level is Severity.UNKNOWN)


# ── packages ──


def check_packages() -> Iterator[Finding]:
    """SGLang and torch: there, and of the versions that belong together."""
    sglang, torch = _version("sglang"), _version("torch")
    if sglang is None or torch is None:
        absent = " and ".join(name for name, version in (("sglang", sglang), ("torch", torch)) if version is None)
        yield Finding(subject="packages", text=f"{absent} not installed", level=Severity.BAD, hint=AGAIN)
        return
    cuda, rocm = torch_build()
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "no CUDA"
    pair = f"sglang {sglang} with torch {torch} ({build}), Python {'.'.join(map(str, sys.version_info[:3]))}"
    if not SGLANG.contains(sglang, prereleases=True):
        seen = f"{pair}: the launcher works with sglang{SGLANG} alone"
        yield Finding(subject="packages", text=seen, level=Severity.BAD, hint=AGAIN)
    elif cuda is None:
        yield Finding(subject="packages", text=f"{pair}: not a build for CUDA", level=Severity.GPU, hint=AGAIN)
    elif wanted := _not_met("sglang", "torch", torch):
        yield Finding(
            subject="packages", text=f"{pair}: this SGLang requires torch{wanted}", level=Severity.NOTE, hint=AGAIN
        )
    else:
        yield Finding(subject="packages", text=pair)


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


def check_tools(inherited: Mapping[str, str]) -> Iterator[Finding]:
    """SGLang's, FlashInfer's and Triton's kernels are compiled on the machine where they run, at their first use."""
    found = toolchain.find_toolkit(inherited)
    if why := toolchain.why_no_toolkit(inherited):
        given = next((f"unset {name}" for name in toolchain.VARIABLES if inherited.get(name)), "")
        remedy = f"{given}{' or ' if given else ''}pip install -c constraints.txt nvidia-cuda-nvcc"
        yield Finding(subject="CUDA toolkit", text=why, level=Severity.GPU, hint=remedy)
    else:
        seen = str(found) if found else "none installed; the pip packages' own is used"
        yield Finding(subject="CUDA toolkit", text=seen)
    header = toolchain.python_header()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for name, program, remedy in (
        ("ninja", toolchain.find_ninja(inherited), "pip install ninja"),
        ("C++ compiler", toolchain.find_compiler(inherited, "CXX", "c++"), "apt-get install g++"),
        ("C compiler", toolchain.find_compiler(inherited, "CC", "gcc", "clang", "cc"), "apt-get install gcc"),
        ("Python.h", str(header) if header.exists() else None, f"apt-get install python{version}-dev"),
    ):
        if program is None:
            yield Finding(subject=name, text="not found", level=Severity.GPU, hint=remedy)
        else:
            yield Finding(subject=name, text=program)


def check_caches(inherited: Mapping[str, str]) -> Finding:
    """Without a place to write, a server ends in a PermissionError of one of the five at its first kernel."""
    folders = [_cache_folder(ways, inherited) for ways in CACHES]
    refused = [f"{folder}: can't be made" for folder in folders if not _may_be_made(folder)]
    if not refused:
        return Finding(subject="kernel caches", text=", ".join(sorted({str(folder.parent) for folder in folders})))
    return Finding(
        subject="kernel caches",
        text="; ".join(refused),
        level=Severity.GPU,
        hint="set HOME (docker -e HOME=/work/outputs), or TRITON_HOME and its like, to a folder that may be written",
    )


def _cache_folder(ways: Sequence[tuple[str, str]], inherited: Mapping[str, str]) -> Path:
    named = (Path(inherited[variable]).expanduser() / below for variable, below in ways if inherited.get(variable))
    return next(named, Path.home() / ways[-1][1])


def _may_be_made(folder: Path) -> bool:
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


# ── the surroundings ──


def check_variables(inherited: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that other launchers set, under which a process takes another GPU than Ray has given it."""
    if (value := inherited.get(KEEPS_GPUS, "")) not in OFF:
        seen = f"{KEEPS_GPUS}={value}: Ray leaves each process all GPUs, so that two take the same one"
        remedy = f"unset {KEEPS_GPUS}; on a cluster before `ray start`, on each node"
        yield Finding(subject="variables", text=seen, level=Severity.GPU, hint=remedy)
    if (order := inherited.get(DEVICE_ORDER, AS_NVML)) != AS_NVML:
        seen = f"{DEVICE_ORDER}={order}: CUDA numbers the GPUs otherwise than NVML, by which memory is planned"
        yield Finding(subject="variables", text=seen, level=Severity.GPU, hint=f"unset {DEVICE_ORDER}")
    if (rank := inherited.get(LOCAL_RANK)) is not None:
        seen = f"{LOCAL_RANK}={rank}, as under torchrun: each trainer rank would take GPU {rank}, which it may not see"
        remedy = f"unset {LOCAL_RANK}; start the launcher by itself, not under torchrun or srun --ntasks"
        yield Finding(subject="variables", text=seen, level=Severity.GPU, hint=remedy)


def check_shared_memory(folder: Path = MEMORY_BACKED) -> Finding:
    """Through it NCCL's processes of one node talk. What the weights need there is the run's own (missing_machine)."""
    try:
        room = shutil.disk_usage(folder)
    except OSError as error:
        seen, free = f"{folder}: {error.strerror}", 0
    else:
        free = room.free
        seen = f"{free / GIB:.2f} of {room.total / GIB:.2f} GiB free"
    if free >= LEAST_SHARED_MEMORY:
        return Finding(subject=str(folder), text=seen)
    remedy = "docker: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium: Memory; else free some of it"
    need = f"{seen}; NCCL needs {LEAST_SHARED_MEMORY / GIB:g} GiB"
    return Finding(subject=str(folder), text=need, level=Severity.SEVERAL, hint=remedy)


def check_processes(room: float, limit: str, *, least: int = LEAST_THREADS) -> Finding:
    """Where no thread can be started, Ray aborts, each process of its own with a page of addresses."""
    if not limit:
        return Finding(subject="processes", text="no limit")
    seen = f"room for {room:.0f} more processes and threads ({limit})"
    if room >= least:
        return Finding(subject="processes", text=seen)
    need = f"{seen}; {least} are needed"
    remedy = "raise it (ulimit -u 8192; docker: --pids-limit=-1), or end other processes of this account"
    return Finding(subject="processes", text=need, level=Severity.BAD, hint=remedy)
