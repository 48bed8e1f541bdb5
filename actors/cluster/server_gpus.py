"""The GPUs of one server: those that Ray gave its actor, and free ones of its node in place of those set aside.

NVML records the Xid errors of those that it uses, and is asked when it has ended.

A GPU that is set aside stays reserved by the actor that it was given to, so that Ray gives it to nobody. Each other one
is reserved by a small actor, which ends with the server's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.node_identity import this_node
from launcher.base.gpu_names import GpuName
from launcher.base.messages import Cause, ServerExit
from launcher.policy.exit_cause import GPU_FAULT, find_server_cause
from launcher.resources.gpu_checks import name_gpus
from launcher.resources.gpu_events import XidWatch, describe_xids, hardware_xids
from launcher.resources.gpu_quarantine import is_among

HOLD_S = 20.0
"""For Ray to start the process that reserves a GPU which it says is free."""

Spare = tuple[Any, str]


@ray.remote(num_cpus=0)
class GpuHold:
    """Reserves a GPU for another actor's process, and does nothing."""

    def number(self) -> str:
        return str(ray.get_gpu_ids()[0])


def hold_spare() -> Spare | None:
    """A free GPU of this node and the actor that holds it; None where Ray has none. Blocks for up to HOLD_S."""
    free = available_resources_per_node().get(this_node(), {})  # type: ignore[no-untyped-call]
    if free.get("GPU", 0) < 1:
        return None
    here = NodeAffinitySchedulingStrategy(this_node(), soft=False)
    kind: Any = GpuHold
    holder = kind.options(num_gpus=1, scheduling_strategy=here).remote()
    try:
        return holder, ray.get(holder.number.remote(), timeout=HOLD_S)
    except RayError:  # another took it first
        ray.kill(holder)
        return None


class ServerGpus:
    """`own`: numbers that Ray gave the actor, none on the CPU. `numbers`: those for the server."""

    def __init__(
        self,
        own: tuple[str, ...],
        *,
        hold: Callable[[], Spare | None] = hold_spare,
        name: Callable[[Sequence[str]], tuple[GpuName, ...]] = name_gpus,
    ) -> None:
        self.numbers = own
        self._xids: XidWatch | None = None
        self._own = own
        self._hold, self._name = hold, name
        self._spares: list[Spare] = []
        self._choosing = asyncio.Lock()

    async def choose(self, avoid: Sequence[GpuName]) -> tuple[str, ...]:
        """As many as it was given, without those to `avoid`; all of its own where too few others are free."""
        if not (avoid and self._own):
            return self.numbers
        async with self._choosing:
            self.numbers = await asyncio.to_thread(self._chosen, avoid)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.numbers)  # this process asks NVML which device it has
        return self.numbers

    def _chosen(self, avoid: Sequence[GpuName]) -> tuple[str, ...]:
        while True:
            reserved = (*self._own, *(number for _, number in self._spares))
            sound = [gpu.number for gpu in self._name(reserved) if not is_among(gpu, avoid)]
            if len(sound) >= len(self._own):
                return tuple(sound[: len(self._own)])
            spare = self._hold()
            if spare is None:
                return self._own
            self._spares.append(spare)

    async def watch(self) -> None:
        """Begin to record the Xid errors of its GPUs, for one incarnation; what came before is forgotten."""
        if self._own:
            await asyncio.to_thread(self._watch)

    def _watch(self) -> None:
        if self._xids is not None:
            self._xids.close()
        self._xids = XidWatch(self.numbers)

    async def named(self) -> tuple[GpuName, ...]:
        """Those for the server, with what NVML says of each now."""
        return await asyncio.to_thread(self._name, self.numbers)

    async def explained(self, end: ServerExit) -> ServerExit:
        """The end of an incarnation, with what NVML says of its GPUs: Xid errors, and which of them can't be read.

        `gpus` are given where one of them may be what ended it. One that was told to end is returned as it is.
        """
        if end.was_told or not self._own:
            return end
        gpus, lines = await asyncio.to_thread(self._asked)
        end = replace(end, reason=" | ".join((end.reason, *lines)))
        is_fault = find_server_cause(end.reason.split(" | "), end.exit_code).cause is Cause.GPU_FAULT
        return replace(end, gpus=gpus if is_fault else ())

    def _asked(self) -> tuple[tuple[GpuName, ...], list[str]]:
        gpus, seen, unknown = self._name(self.numbers), {}, {}
        if self._xids is not None:
            seen, unknown = self._xids.seen(), self._xids.unknown
        lost = [gpu.fault for gpu in gpus if GPU_FAULT.search(gpu.fault)]
        faults = {gpu.number: [hardware_xids(seen.get(gpu.number, ())), gpu.fault] for gpu in gpus}
        named = tuple(replace(gpu, fault="; ".join(filter(None, faults[gpu.number]))) for gpu in gpus)
        return named, lost + describe_xids(seen, unknown)
