"""The checks of a node's GPUs through NVML: driver, readable, whole, open to several processes, free of defects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pynvml

from launcher.base.findings import Finding, Severity
from launcher.base.wording import ranges
from launcher.resources import gpus
from launcher.resources.memory_estimate import GIB

DRIVERS = {12: "525", 13: "580"}
"""The oldest driver branch of each major CUDA version, by NVIDIA's table of minor-version compatibility."""
NO_DRIVER = "install NVIDIA's driver (`nvidia-smi` must answer); in a container: --gpus all"
NVML_REMEDIES = {
    pynvml.NVML_ERROR_NO_PERMISSION: "this account may not open the GPUs' files (ls -l /dev/nvidia*): have it put into "
    "their group; in a container: --gpus all",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was upgraded, and the kernel has the older one: reboot; "
    "in a container: start it again",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver's kernel module (modprobe nvidia; dmesg says why not), "
    f"or {NO_DRIVER}",
}
"""By NVML's error; of all others: `NO_DRIVER`."""
NO_GPU = "GPU"
"""The name of the row where there is none; one of a GPU has its number."""
BUSY = 0.02
"""Of its memory, held by others; the driver itself keeps less."""
NOT_THERE = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""This kind of GPU, or its driver, has no such thing; after any other error it is not known."""


class Questions:
    """What NVML is asked of one GPU, within `nvml`. `unknown`: what it did not answer, with its own words."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.unknown: list[str] = []

    def ask(self, what: str, question: Callable[[Any], Any]) -> Any:
        """None where the GPU has no such thing, or it is not known."""
        try:
            return question(self._handle)
        except pynvml.NVMLError as error:
            if error.value not in NOT_THERE:
                self.unknown.append(f"{what} ({error})")
            return None

    @property
    def not_known(self) -> str:
        """In one line; "" where all was answered."""
        return f"not known: {', '.join(self.unknown)}" if self.unknown else ""


def check_gpus(torch_cuda: str | None) -> Iterator[Finding]:
    """`torch_cuda`: the version that torch was built for."""
    try:
        with gpus.nvml() as count:
            yield _driver(torch_cuda)
            positions = gpus.visible(gpus.names_of_gpus(count), os.environ.get("CUDA_VISIBLE_DEVICES"))
            yield from _each(positions)
            if not positions:
                yield Finding(subject=NO_GPU, text=gpus.find_gpus().none, level=Severity.GPU, hint=_why_hidden(count))
    except pynvml.NVMLError as error:
        found = gpus.find_gpus()
        remedy = NVML_REMEDIES.get(error.value, NO_DRIVER)
        if found.is_unusable:
            remedy = f"{gpus.SUPPORTED}: run it elsewhere, or on this machine's CPU"
        yield Finding(subject=NO_GPU, text=found.none, level=Severity.GPU, hint=remedy)


def _why_hidden(count: int) -> str:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "MIG-" in chosen:
        return "set CUDA_VISIBLE_DEVICES to whole GPUs, and turn MIG off: nvidia-smi -mig 0"
    return "unset CUDA_VISIBLE_DEVICES" if count else NO_DRIVER


def _driver(torch_cuda: str | None) -> Finding:
    driver, version = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    seen = f"{driver}, for CUDA {version // 1000}.{version % 1000 // 10}"
    major = int(torch_cuda.partition(".")[0]) if torch_cuda else 0
    if version // 1000 >= major:
        return Finding(subject="driver", text=seen)
    branch = DRIVERS.get(major, "")
    return Finding(
        subject="driver",
        text=f"{seen}: too old for torch, which is built for CUDA {torch_cuda}",
        level=Severity.GPU,
        hint=f"install a driver of branch {branch} or newer on this node" if branch else "install a newer driver",
    )


def _each(positions: list[int]) -> Iterator[Finding]:
    """Those that are alike and have no fault in one row; a row for each fault."""
    sound: dict[str, list[int]] = {}
    for index in positions:
        try:
            gpu = gpus.gpu_of(index)
            questions = Questions(gpus.handle_of(index))
            faults = list(_faults(index, questions))
        except gpus.UnreadableGpu as error:
            remedy = f"see the kernel's log (dmesg | grep Xid) and reset it: nvidia-smi -i {index} -r; {_hide(index)}"
            if error.is_unsupported:
                remedy = "GPUs that share the host's memory are not supported, as no plan can be made of them"
            yield Finding(subject=f"GPU {index}", text=str(error), level=Severity.GPU, hint=remedy)
            continue
        yield from faults
        if questions.unknown:
            remedy = "ask it again; where it stays so, see the kernel's log (dmesg | grep Xid)"
            yield Finding(subject=f"GPU {index}", text=questions.not_known, level=Severity.UNKNOWN, hint=remedy)
        used = gpu.memory - gpu.free
        seen = f"{gpu.name}, {gpu.memory / GIB:.1f} GiB"
        if used > BUSY * gpu.memory:
            holders = ", ".join(map(str, _holders(questions))) or "not known"
            held = f"{seen}, of which {used / GIB:.1f} are held (pids: {holders})"
            yield Finding(
                subject=f"GPU {index}",
                text=held,
                level=Severity.NOTE,
                hint="end those processes, or choose another GPU",
            )
        elif not (faults or questions.unknown):
            sound.setdefault(seen, []).append(index)
    for seen, alike in sound.items():
        yield Finding(subject=f"GPU {ranges(alike)}", text=seen)


def _faults(index: int, questions: Questions) -> Iterator[Finding]:
    name, command = f"GPU {index}", f"nvidia-smi -i {index}"
    if (questions.ask("MIG mode", pynvml.nvmlDeviceGetMigMode) or [0])[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        yield Finding(
            subject=name, text="divided by MIG, which no run can use", level=Severity.GPU, hint=f"{command} -mig 0"
        )
    mode = questions.ask("compute mode", pynvml.nvmlDeviceGetComputeMode)
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        yield Finding(subject=name, text="compute mode PROHIBITED", level=Severity.GPU, hint=f"{command} -c DEFAULT")
    elif mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        seen = "compute mode EXCLUSIVE_PROCESS: a server and the trainer can't share it"
        yield Finding(subject=name, text=seen, level=Severity.SHARED, hint=f"{command} -c DEFAULT")
    yield from _defects(index, questions)


def faults_of_gpus(numbers: Sequence[str]) -> list[str]:
    """What is wrong with GPUs of this node, as CUDA_VISIBLE_DEVICES has them; nothing is known without NVML."""
    try:
        with gpus.nvml() as count:
            names = gpus.names_of_gpus(count)
            found = (_defect_of(at[0]) for number in numbers if (at := gpus.visible(names, number)))
            return [fault for fault in found if fault]
    except pynvml.NVMLError:
        return []


def _defect_of(index: int) -> str:
    """What is wrong with the GPU itself, and what of that is not known; "" for nothing."""
    try:
        questions = Questions(gpus.handle_of(index))
        defects = [check.text for check in _defects(index, questions)]
        return "; ".join([*defects, *filter(None, [questions.not_known])])
    except gpus.UnreadableGpu as error:
        return str(error)


def _defects(index: int, questions: Questions) -> Iterator[Finding]:
    name, command = f"GPU {index}", f"nvidia-smi -i {index}"
    rows = questions.ask("defects of its memory", pynvml.nvmlDeviceGetRemappedRows) or (0, 0, 0, 0)
    if rows[3]:
        seen = "a defect of its memory could not be remapped"
        yield Finding(subject=name, text=seen, level=Severity.GPU, hint=f"have it replaced; {_hide(index)}")
    elif rows[2]:
        yield Finding(
            subject=name, text="a defect of its memory waits to be remapped", level=Severity.NOTE, hint=f"{command} -r"
        )
    errors = questions.ask(
        "memory (ECC) errors",
        lambda one: pynvml.nvmlDeviceGetTotalEccErrors(
            one, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
    )
    if errors:
        seen = f"{errors} uncorrectable memory (ECC) errors since the driver was loaded"
        yield Finding(
            subject=name, text=seen, level=Severity.NOTE, hint=f"{command} -r; where they come back: {_hide(index)}"
        )


def _holders(questions: Questions) -> list[int]:
    processes = questions.ask("its processes", pynvml.nvmlDeviceGetComputeRunningProcesses) or []
    return sorted({one.pid for one in processes})


def _hide(index: int) -> str:
    return f"or leave it out with CUDA_VISIBLE_DEVICES (its number is {index})"
