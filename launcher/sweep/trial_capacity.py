"""Decides how many trials run side by side, and on which GPUs each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config.schema import RunConfig
from launcher.resources.hardware import Hardware
from launcher.resources.run_plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCapacity:
    """One entry in `slots` for each trial at a time: numbers of the GPUs that it has for itself."""

    slots: tuple[tuple[int, ...], ...]
    reason: str


def find_capacity(configs: Sequence[RunConfig], plans: Sequence[RunPlan], hardware: Hardware) -> TrialCapacity:
    """By the trial that needs most of each. `sweep.parallel` is taken as it is; GPUs bound it all the same."""
    gpus = max(plan.gpus_needed for plan in plans)
    wanted = configs[0].sweep.parallel
    is_here = all(config.cluster.address == "local" for config in configs)
    most, reason = (
        _fitting(configs, plans, hardware, gpus) if is_here else (1, "of another cluster's room nothing is known here")
    )
    if wanted is not None:
        by_gpus = len(hardware.gpus) // gpus if gpus and is_here else wanted
        most, reason = (wanted, f"sweep.parallel={wanted}") if wanted <= by_gpus else (by_gpus, f"{gpus} GPUs each")
    count = max(1, min(most, len(configs)))
    gpus = gpus if is_here else 0
    return TrialCapacity(
        slots=tuple(tuple(range(slot * gpus, (slot + 1) * gpus)) for slot in range(count)), reason=reason
    )


def _fitting(configs: Sequence[RunConfig], plans: Sequence[RunPlan], hardware: Hardware, gpus: int) -> tuple[int, str]:
    if any(config.sglang.port is not None for config in configs):
        return 1, "sglang.port is one trial's at a time"
    cpus = max(sum(process.placement.cpus for process in plan.processes) for plan in plans)
    memory = max((place.planned for plan in plans for place in plan.places if place.gpu is None), default=0)
    rooms = [(int(hardware.cpus // cpus) if cpus else len(configs), f"{cpus:g} of {hardware.cpus} CPUs each")]
    if gpus:
        rooms.append((len(hardware.gpus) // gpus, f"{gpus} of {len(hardware.gpus)} GPUs each"))
    if memory:
        each = f"{memory / 2**30:.1f} of {hardware.memory_free / 2**30:.1f} GiB of free memory each"
        rooms.append((hardware.memory_free // memory, each))
    return min(rooms)
