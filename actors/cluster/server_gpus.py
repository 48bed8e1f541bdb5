"""What NVML says of the GPUs of one server: it records their Xid errors, and is asked when the server has ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from launcher.base.messages import ServerExit
from launcher.policy.exit_cause import GPU_FAULT
from launcher.resources.gpu_checks import faults_of_gpus
from launcher.resources.gpu_events import XidWatch, describe_xids


class ServerGpus:
    """`numbers`: those that Ray gave the server's actor, none on the CPU."""

    def __init__(self, numbers: tuple[str, ...]) -> None:
        self.numbers = numbers
        self._xids: XidWatch | None = None

    async def watch(self) -> None:
        """Begin to record their Xid errors, for one incarnation; what came before is forgotten."""
        if self.numbers:
            await asyncio.to_thread(self._watch)

    def _watch(self) -> None:
        if self._xids is not None:
            self._xids.close()
        self._xids = XidWatch(self.numbers)

    async def explained(self, end: ServerExit) -> ServerExit:
        """The end of an incarnation, with what NVML says of its GPUs: Xid errors, and which of them can't be read. One
        that was told to end is returned as it is."""
        if end.was_told or not self.numbers:
            return end
        return replace(end, reason=" | ".join((end.reason, *await asyncio.to_thread(self._asked))))

    def _asked(self) -> list[str]:
        lost = [fault for fault in faults_of_gpus(self.numbers) if GPU_FAULT.search(fault)]
        return lost if self._xids is None else lost + describe_xids(self._xids.seen(), self._xids.unknown)
