"""Why did a process end? From its exit, the end of its log and the kernel's counters; text in, cause out.

The texts are SGLang's (0.5.17: mem_cache/*, model_executor/pool_configurator.py, managers/*), torch's, Triton's, those
of CUDA's libraries, Ray's and the kernel's own; `tests/unit/launcher/policy/data/exit_messages.toml` has each as its
library writes it, and a test searches the installed SGLang for others. Where memory ran out decides what has to give
way, and at start-up and at run time the remedies are opposite (launcher/policy/memory_backoff.py).
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base.disk_faults import IN_TEXT
from launcher.base.messages import Cause


class RanOut(enum.StrEnum):
    """Where memory ran out.

    SERVER_POOL_TOO_SMALL: at start-up, no room was left for the KV cache. SERVER_POOL: at run time, the KV cache was
    too small for what was asked. SERVER_DEVICE: an allocation failed beside the cache. HOST: the machine's memory, or
    the cgroup's limit.
    """

    SERVER_POOL_TOO_SMALL = "server_pool_too_small"
    SERVER_POOL = "server_pool"
    SERVER_DEVICE = "server_device"
    SERVER_HOST = "server_host"
    TRAINER_DEVICE = "trainer_device"
    TRAINER_HOST = "trainer_host"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFinding:
    """Why a process ended. `line` is the line of its log that shows it, "" where only the exit does."""

    cause: Cause
    reason: str
    line: str = ""
    ran_out: RanOut | None = None


POOL_TOO_SMALL = re.compile(r"([Ii]ncrease|Raise) --mem-fraction-static")
LEAST_FRACTION = re.compile(r"Raise --mem-fraction-static above (0\.\d+)")
POOL = re.compile(
    r"[Oo]ut of memory\. Try to lower your batch size|alloc_req_slots runs out of memory"
    r"|Out of memory even after retracting"
)
DEVICE = re.compile(
    r"torch(\.cuda)?\.OutOfMemoryError|(CUDA|HIP) out of memory|CUDA (driver )?error: out of memory"
    r"|would exceed allowed memory\. \(out of memory\)|Triton Error \[CUDA\]: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|HBM is free\. Lower"
)
NCCL_ALLOCATION = re.compile(r"Failed to CUDA (host )?[cm]alloc")
"""After every failure of CUDA too: what else the log says comes first."""
GPU_FAULT = re.compile(
    r"[Uu]ncorrectable (ECC|NVLink) error|access of peer GPU memory over nvlink or a hardware error"
    r"|hardware stack error|GPU is lost|GPU has fallen off the bus|NVRM: Xid"
    r"|CUDA_ERROR_(ECC|NVLINK)_UNCORRECTABLE|cudaError(ECC|Nvlink)Uncorrectable"
)
ILLEGAL_ACCESS = re.compile(
    r"illegal memory access was encountered|misaligned address|illegal instruction was encountered"
    r"|unspecified launch failure"
)
XID = re.compile(r"NVML reports Xid \d")
"""As launcher/resources/gpu_events.py writes it; the log's own words for memory and disks come first."""
HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory|\bMemoryError\b|std::bad_alloc"
    r"|ray\.exceptions\.OutOfMemoryError|node running low on memory|Out of memory: Killed process"
    r"|Memory cgroup out of memory|C10 Out of Memory|memory allocation of \d+ bytes failed|RAW: mmap error: 12\b"
    r"|Not enough host memory (available|for .*(pool|cache))|No space left on device.*(/dev/shm|shm)"
)
DISK = IN_TEXT
HANG = re.compile(r"watchdog timeout")
DAMAGED_WEIGHTS = re.compile(
    r"SafetensorError|Error while deserializing header|Cannot find any model weights with|PytorchStreamReader failed"
)
SERVER_CRASH = re.compile(
    r"(Scheduler|Detokenizer\w*|Tokenizer\w*|MultiTokenizerRouter|MultiDetokenizerRouter|DataParallelController)"
    r" hit an exception|Cache flush failed after updating weights|Subprocess \S+ \(pid=\d+\) crashed"
)
RANK_HANG = re.compile(r"trainer rank \d+ .*does not answer for")
NONFINITE = re.compile(r"TrainerError\b.*\bnot finite")

Patterns = Sequence[tuple[re.Pattern[str], Cause, str, RanOut | None]]

OF_A_GPU: Patterns = (
    (GPU_FAULT, Cause.GPU_FAULT, "its GPU reports a fault (ECC, NVLink, or lost)", None),
    (ILLEGAL_ACCESS, Cause.GPU_FAULT, "an illegal access on its GPU: a kernel's defect, or the GPU's", None),
)
OF_A_SERVER: Patterns = (
    OF_A_GPU[0],
    (POOL_TOO_SMALL, Cause.SERVER_OOM, "no room for the KV cache at start-up", RanOut.SERVER_POOL_TOO_SMALL),
    (POOL, Cause.SERVER_OOM, "the KV cache was too small", RanOut.SERVER_POOL),
    (DEVICE, Cause.SERVER_OOM, "out of device memory", RanOut.SERVER_DEVICE),
    (HOST, Cause.SERVER_OOM, "out of host memory", RanOut.SERVER_HOST),
    OF_A_GPU[1],
    (NCCL_ALLOCATION, Cause.SERVER_OOM, "out of device memory", RanOut.SERVER_DEVICE),
    (DISK, Cause.DISK_FULL, "a disk refused it a write", None),
    (XID, Cause.GPU_FAULT, "the driver reports an Xid error of its GPU", None),
    (HANG, Cause.SERVER_HANG, "its own watchdog ended it", None),
    (DAMAGED_WEIGHTS, Cause.SERVER_CORRUPT, "its weights can't be read", None),
    (SERVER_CRASH, Cause.SERVER_CRASH, "an exception ended it", None),
)
OF_THE_TRAINER: Patterns = (
    OF_A_GPU[0],
    (DEVICE, Cause.TRAINER_OOM, "out of device memory", RanOut.TRAINER_DEVICE),
    (HOST, Cause.TRAINER_OOM, "out of host memory", RanOut.TRAINER_HOST),
    OF_A_GPU[1],
    (NCCL_ALLOCATION, Cause.TRAINER_OOM, "out of device memory", RanOut.TRAINER_DEVICE),
    (DISK, Cause.DISK_FULL, "a disk refused it a write", None),
    (RANK_HANG, Cause.TRAINER_HANG, "a rank does not answer", None),
    (NONFINITE, Cause.NONFINITE, "numbers that are not finite", None),
)
"""In this order: an allocator's message explains the exception that follows it, not the other way round."""


def find_server_cause(log_tail: Sequence[str], exit_code: int | None, *, oom_kills: int = 0) -> ExitFinding:
    """Why a server ended. `log_tail`: lines of this incarnation only. `oom_kills`: processes that the kernel has
    killed for memory in its lifetime."""
    return _first_match(OF_A_SERVER, log_tail) or _by_exit(
        exit_code, oom_kills, oom=(Cause.SERVER_OOM, RanOut.SERVER_HOST), else_cause=Cause.SERVER_CRASH
    )


def find_trainer_cause(log_tail: Sequence[str], exit_code: int | None, *, oom_kills: int = 0) -> ExitFinding:
    """Why the trainer ended; arguments as above."""
    return _first_match(OF_THE_TRAINER, log_tail) or _by_exit(
        exit_code, oom_kills, oom=(Cause.TRAINER_OOM, RanOut.TRAINER_HOST), else_cause=Cause.TRAINER_CRASH
    )


def least_fraction(said: str) -> float:
    """The share of the GPU that SGLang says its weights and its cache need at least; 0 where it names none."""
    found = LEAST_FRACTION.search(said)
    return float(found[1]) if found else 0.0


def _first_match(patterns: Patterns, log_tail: Sequence[str]) -> ExitFinding | None:
    for pattern, cause, reason, ran_out in patterns:
        for line in log_tail:
            if pattern.search(line):
                return ExitFinding(cause=cause, reason=reason, line=line.strip(), ran_out=ran_out)
    return None


def _by_exit(exit_code: int | None, oom_kills: int, *, oom: tuple[Cause, RanOut], else_cause: Cause) -> ExitFinding:
    if oom_kills > 0 and exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        cause, ran_out = oom
        reason = f"{_exit_text(exit_code)}, and the kernel has killed for memory (oom_kill {oom_kills})"
        return ExitFinding(cause=cause, reason=reason, ran_out=ran_out)
    return ExitFinding(cause=else_cause, reason=_exit_text(exit_code))


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended, its exit code is not known"
    number = -exit_code if exit_code < 0 else exit_code - 128
    names = {member.value: member.name for member in signal.Signals}
    return f"ended by {names[number]}" if number in names else f"exited with {exit_code}"
