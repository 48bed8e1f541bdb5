"""Decides which GPUs a run uses no more because a server met a fault of theirs, and reads them from its journal.

a server ends with cause gpu_fault ─► to_quarantine ─► event gpu.quarantined ─► no server is started on it again,
in this attempt or a later one; a later one on a machine of its own leaves it out for the trainer too
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.base.errors import ResourceError
from launcher.base.gpu_names import GpuName
from launcher.base.messages import Cause, ServerExit
from launcher.config.schema import RunConfig
from launcher.policy.exit_cause import ILLEGAL_ACCESS, find_server_cause
from launcher.resources.capacity import NodeResources, node_name
from launcher.resources.gpu_checks import visible_gpus
from launcher.resources.placement import place
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths

QUARANTINED = "gpu.quarantined"
VISIBLE = "CUDA_VISIBLE_DEVICES"
SECOND_ACCESS = (
    "a second GPU met an illegal access, which is more likely a kernel's defect than a second broken GPU: "
    "no further one is set aside for it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedGpu:
    """`is_access`: for an illegal access, which a kernel's defect gives too. `server`: which met it."""

    gpu: GpuName
    reason: str
    server: str
    is_access: bool = False

    def facts(self) -> dict[str, object]:
        """Of the event."""
        gpu = self.gpu
        return {"host": gpu.host, "gpu": gpu.number, "uuid": gpu.uuid, "server": self.server, "access": self.is_access}


class QuarantineRecord:
    """The GPUs that the journal says are set aside, in this attempt and in earlier ones."""

    def __init__(self) -> None:
        self.gpus: list[QuarantinedGpu] = []

    def take(self, event: Mapping[str, object]) -> None:
        if event.get("event") != QUARANTINED:
            return
        host, number, uuid, server = (str(event.get(key, "")) for key in ("host", "gpu", "uuid", "server"))
        gpu = GpuName(host=host, number=number, uuid=uuid)
        reason, is_access = str(event.get("reason", "")), event.get("access") is True
        self.gpus.append(QuarantinedGpu(gpu=gpu, reason=reason, server=server, is_access=is_access))

    def among(self, gpus: Sequence[GpuName]) -> list[GpuName]:
        """Those of `gpus` that are set aside."""
        return [gpu for gpu in gpus if is_among(gpu, self.names)]

    def moved(self, server: str) -> bool:
        """Whether it had a GPU that is set aside now."""
        return any(one.server == server for one in self.gpus)

    @property
    def names(self) -> tuple[GpuName, ...]:
        return tuple(one.gpu for one in self.gpus)


def leave_out(config: RunConfig) -> tuple[str, ...]:
    """Hide the GPUs that are set aside from this process and all that it starts, where the run fits on the others.

    For a run on this machine; on a cluster its servers do without them. Returns what the plan is to say of it.
    """
    if config.cluster.address != "local" or not config.recovery.quarantine_gpus:
        return ()
    events, record = RunPaths.of(config).events, QuarantineRecord()
    for event in read_lines(events) if events.exists() else ():
        record.take(event)
    gpus = visible_gpus() if record.gpus else ()
    bad = {gpu: one.reason for one in record.gpus for gpu in gpus if gpu.is_same(one.gpu)}
    if not bad:
        return ()
    left = [gpu for gpu in gpus if gpu not in bad]
    named = ", ".join(f"{gpu}: {reason}" for gpu, reason in bad.items())
    if not _fits(config, len(left)):
        return (f"set aside in this run, and used, as it does not fit on the {len(left)} other GPUs: {named}",)
    os.environ[VISIBLE] = ",".join(gpu.number for gpu in left)
    return (f"set aside in this run, and not used (recovery.quarantine_gpus=false uses it): {named}",)


def _fits(config: RunConfig, gpus: int) -> bool:
    at_most = config.cluster.n_gpus_per_node
    node = NodeResources(name=node_name(0), gpus=gpus if at_most is None else min(gpus, at_most), cpus=math.inf)
    servers_on, trainer_on = ("cpu" if one == "cpu" else "cuda" for one in (config.sglang.device, config.actor.device))
    try:
        place(config, servers_on=servers_on, trainer_on=trainer_on, nodes=(node,))
    except ResourceError:
        return False
    return True


def is_among(gpu: GpuName, gpus: Sequence[GpuName]) -> bool:
    return any(gpu.is_same(other) for other in gpus)


def to_quarantine(end: ServerExit, known: Sequence[QuarantinedGpu]) -> tuple[tuple[QuarantinedGpu, ...], str]:
    """What the end of a server sets aside besides those `known`; and why nothing, where that needs to be told.

    Of several GPUs those in which NVML finds a fault, all where it finds none. An illegal access counts once in a run,
    unless NVML names the GPU.
    """
    found = find_server_cause(end.reason.split(" | "), end.exit_code)
    if found.cause is not Cause.GPU_FAULT:
        return (), ""
    suspects = [gpu for gpu in end.gpus if gpu.fault] or list(end.gpus)
    new = [gpu for gpu in suspects if not is_among(gpu, [one.gpu for one in known])]
    is_access = ILLEGAL_ACCESS.search(found.line) is not None
    if new and is_access and not new[0].fault and any(one.is_access for one in known):
        return (), SECOND_ACCESS
    return tuple(
        QuarantinedGpu(
            gpu=gpu, reason=f"{gpu.fault or found.reason} ({end.name})", server=end.name, is_access=is_access
        )
        for gpu in new
    ), ""
