"""Reads this node's GPUs from NVML, and which accelerators it has that no run can use. No CUDA context is made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

SYSTEM = Path("/")
SUPPORTED = "only NVIDIA GPUs (CUDA) and the CPU are supported"

AMD, GOOGLE, HABANA = "0x1002", "0x1ae0", "0x1da3"
TPU_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""PCI ids of Google's TPUs; its network cards and disks have the same vendor."""
PROCESSING, OTHER_DISPLAY = "0x1200", "0x0380"
"""PCI classes of accelerators without a screen: AMD's Instinct are of either."""
DEVICE_FILES = {"dev/neuron0": "an AWS Neuron device", "dev/davinci0": "a Huawei Ascend NPU"}


NO_DRIVER = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
"""Any other error is of one that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; sizes in bytes. `free` is what no process holds now."""

    name: str
    memory: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; `none`: why there is none; `is_unusable`: an accelerator is there."""

    gpus: tuple[Gpu, ...] = ()
    none: str = ""
    is_unusable: bool = False


def find_gpus() -> FoundGpus:
    """All of those that are left must be readable: CUDA starts with none where one of them does not answer."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with nvml() as count:
            gpus = tuple(gpu_of(index) for index in visible(names_of_gpus(count), chosen))
    except UnreadableGpu as error:
        return FoundGpus(none=str(error), is_unusable=True)
    except pynvml.NVMLError as error:
        if others := other_accelerators():
            return FoundGpus(none=f"here is {others}: {SUPPORTED}", is_unusable=True)
        return FoundGpus(
            none=f"{'NVML finds no driver' if error.value in NO_DRIVER else 'NVML does not answer'} ({error})"
        )
    if gpus:
        return FoundGpus(gpus=gpus)
    if chosen is not None and "MIG-" in chosen:
        return FoundGpus(none=f"CUDA_VISIBLE_DEVICES={chosen} is a part of a GPU (MIG), which no run can use")
    return FoundGpus(none="NVML finds none" if not count else f"CUDA_VISIBLE_DEVICES hides all {count}")


class UnreadableGpu(Exception):
    """A GPU that NVML counts and can't read, as one that has fallen off the bus."""

    def __init__(self, index: int, error: pynvml.NVMLError) -> None:
        super().__init__(f"GPU {index} can't be read ({error})")
        self.is_unsupported = error.value == pynvml.NVML_ERROR_NOT_SUPPORTED


@contextlib.contextmanager
def nvml() -> Iterator[int]:
    """How many GPUs the node has. Raises NVMLError, where there is no driver too."""
    pynvml.nvmlInit()
    try:
        yield int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def handle_of(index: int) -> Any:
    """Within `nvml`. Raises UnreadableGpu."""
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        raise UnreadableGpu(index, error) from error


def gpu_of(index: int) -> Gpu:
    """Its name and its memory. Within `nvml`. Raises UnreadableGpu."""
    handle = handle_of(index)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return Gpu(name=_text(pynvml.nvmlDeviceGetName(handle)), memory=int(memory.total), free=int(memory.free))
    except pynvml.NVMLError as error:
        raise UnreadableGpu(index, error) from error


def uuid_of(handle: Any) -> str:
    """Within `nvml`. Raises NVMLError."""
    return _text(pynvml.nvmlDeviceGetUUID(handle))


def names_of_gpus(count: int) -> list[tuple[str, str]]:
    """Index and UUID of each; the UUID is empty where it can't be read."""
    names = []
    for index in range(count):
        uuid = ""
        with contextlib.suppress(pynvml.NVMLError):  # whoever is to use it reports that
            uuid = uuid_of(pynvml.nvmlDeviceGetHandleByIndex(index))
        names.append((str(index), uuid))
    return names


def visible(names: list[tuple[str, str]], chosen: str | None) -> list[int]:
    """Positions of the GPUs that CUDA_VISIBLE_DEVICES (`chosen`) leaves, `names` being each one's index and UUID.

    As CUDA reads it: in the order given, ending at the first entry that names no GPU; a UUID may be cut short.
    """
    if chosen is None:
        return list(range(len(names)))
    found: list[int] = []
    for entry in (part.strip() for part in chosen.split(",")):
        matches = [
            position
            for position, (index, uuid) in enumerate(names)
            if entry == index or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if len(matches) != 1:
            break
        found += matches
    return found


def other_accelerators(system: Path = SYSTEM) -> str:
    """The kinds of accelerators that are here and not NVIDIA's, from what the kernel lists; "" where it lists none.

    A processor's own graphics are none.
    """
    found = {name for file, name in DEVICE_FILES.items() if (system / file).exists()}
    for folder in (system / "sys/bus/pci/devices").glob("*"):
        vendor, device, kind = (read_text(folder / name) for name in ("vendor", "device", "class"))
        if vendor == GOOGLE and device in TPU_DEVICES:
            found.add("a Google TPU")
        elif vendor == HABANA:
            found.add("an Intel Gaudi")
        elif vendor == AMD and kind.startswith((PROCESSING, OTHER_DISPLAY)) and (system / "dev/kfd").exists():
            found.add("an AMD GPU")
    return " and ".join(sorted(found))


def read_text(file: Path) -> str:
    """Of a file of the kernel's."""
    try:
        return file.read_text().strip()
    except OSError:  # the device went, it is not mounted, or of the other version
        return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
