"""Xid errors of GPUs, from NVML's events: a process without a right to the kernel's log sees them too.

Nothing polls. The driver records what happens on a GPU from the registration on, and is asked when a server has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

import pynvml

from launcher.resources import gpus

OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Given by a program's defect on a sound GPU: what NVIDIA's device plugin for Kubernetes passes over."""
NO_NUMBER = 999
"""NVML's own, for an error that it has no number for."""
FIRST_WAIT_MS = 100
"""For an error that the kernel is about to tell; the rest are there."""
MOST_EVENTS = 1000
"""Of one call, so that a GPU that reports without an end holds nobody up."""


class XidWatch:
    """Records the Xid errors of the GPUs `numbers`, as CUDA_VISIBLE_DEVICES has them, from now until `close`.

    `unknown`: why nothing is known of a GPU, by its number: no driver, an old one, a GPU without such events (NVML's
    own words).
    """

    def __init__(self, numbers: Sequence[str]) -> None:
        self.unknown: dict[str, str] = {}
        self._xids: dict[str, list[int]] = {}
        self._numbers: dict[str, str] = {}  # by UUID
        self._opened = contextlib.ExitStack()
        self._reading = threading.Lock()
        try:
            with contextlib.ExitStack() as opened:
                names = gpus.names_of_gpus(opened.enter_context(gpus.nvml()))
                self._events = pynvml.nvmlEventSetCreate()
                opened.callback(pynvml.nvmlEventSetFree, self._events)
                for number in numbers:
                    self._register(number, names)
                self._opened = opened.pop_all()
        except pynvml.NVMLError as error:
            self.unknown = dict.fromkeys(numbers, str(error))

    def _register(self, number: str, names: list[tuple[str, str]]) -> None:
        try:
            positions = gpus.visible(names, number)
            if not positions:
                self.unknown[number] = "NVML finds no such GPU"
                return
            handle = gpus.handle_of(positions[0])
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except (pynvml.NVMLError, gpus.UnreadableGpu) as error:
            self.unknown[number] = str(error)
        else:
            self._numbers[names[positions[0]][1]] = number

    def seen(self) -> dict[str, list[int]]:
        """The errors so far, by the GPU's number; "" where the GPU they are of can't be read. Blocks for 0.1 s."""
        with self._reading:
            if self._numbers:
                self._read()
            return {number: list(xids) for number, xids in self._xids.items()}

    def _read(self) -> None:
        wait_ms = FIRST_WAIT_MS
        for _ in range(MOST_EVENTS):
            try:
                event = pynvml.nvmlEventSetWait(self._events, wait_ms)
            except pynvml.NVMLError_Timeout:
                return
            except pynvml.NVMLError_GpuIsLost:  # whoever names the GPUs finds which
                return
            except pynvml.NVMLError as error:
                self.unknown |= dict.fromkeys(self._numbers.values(), str(error))
                return
            wait_ms = 0
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                self._xids.setdefault(self._number_of(event.device), []).append(int(event.eventData))

    def _number_of(self, device: object) -> str:
        try:
            return self._numbers.get(gpus.uuid_of(device), "")
        except pynvml.NVMLError:  # it has fallen off the bus
            return ""

    def close(self) -> None:
        """What was seen before can still be asked."""
        with self._reading:
            self._numbers = {}
            self._opened.close()


def hardware_xids(xids: Sequence[int]) -> str:
    """Those that a sound GPU does not give, each once: `Xid 79, 154`; "" for none."""
    found = [str(xid) for xid in dict.fromkeys(xids) if xid not in OF_PROGRAMS and xid != NO_NUMBER]
    return f"Xid {', '.join(found)}" if found else ""


def describe_xids(seen: Mapping[str, Sequence[int]], unknown: Mapping[str, str]) -> list[str]:
    """A line for each GPU with errors, and for each whose errors can't be known; exit_cause.py knows the first kind."""
    lines = []
    for number, xids in sorted(seen.items()):
        which = f"of GPU {number}" if number else "of a GPU that can't be read"
        if faults := hardware_xids(xids):
            lines.append(f"NVML reports {faults} {which}")
        else:
            numbers = ", ".join(map(str, dict.fromkeys(xids)))
            lines.append(f"NVML saw Xid {numbers} {which}, which a defect of a program gives too")
    return lines + [f"Xid errors of GPU {number} are not known ({why})" for number, why in unknown.items()]
