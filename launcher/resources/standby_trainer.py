"""Adds the parked trainer to a plan: whether there is one, and what memory it takes. Pure."""

from __future__ import annotations

import dataclasses

from launcher.config.schema import RunConfig
from launcher.resources import memory_estimate
from launcher.resources.capacity import RANK
from launcher.resources.hardware import Hardware
from launcher.resources.run_plan import MemoryPlace, PlannedProcess, RunPlan, noted

STANDBY = "standby"
KEY = "recovery.standby_trainers"


def with_standby_trainer(config: RunConfig, hardware: Hardware, plan: RunPlan) -> RunPlan:
    """The plan with one beside rank 0, where it was asked for, or where it was left to the plan and has room."""
    wanted = config.recovery.standby_trainers
    if wanted == 0:
        return plan
    rank = next(process for process in plan.processes if process.placement.kind == RANK)
    on_gpu = bool(rank.placement.gpus)
    items = () if plan.shape is None else memory_estimate.standby_trainer(config, plan.shape, on_gpu=on_gpu)
    placement = dataclasses.replace(rank.placement, name="standby trainer", kind=STANDBY, cpus=0, n_gpus=0, gpus=())
    parked = PlannedProcess(placement=placement, items=items)
    why_not = _why_not(config, hardware, plan, parked)
    if wanted is None and why_not:
        return noted(plan, f"no trainer stands by: {why_not} ({KEY}=null)")
    places = tuple(_with(place, parked) for place in plan.places)
    how = "null: 1, as memory allows it" if wanted is None else "1"
    note = f"a second trainer process, parked after the first step, takes over when the trainer ends ({KEY}={how})"
    processes = (*plan.processes, parked)
    return dataclasses.replace(noted(plan, note), processes=processes, places=places, standby_trainers=1)


def _why_not(config: RunConfig, hardware: Hardware, plan: RunPlan, parked: PlannedProcess) -> str:
    if config.actor.dp_size > 1:
        return "of several ranks none is parked"
    if config.cluster.address != "local" and not plan.is_described:
        return "the memory of a running cluster's machines is not known here"
    host = next((place for place in plan.places if _is_host_of(place, parked)), None)
    if host is None:
        return "its memory is not known before the model is here"
    left = host.headroom if plan.is_described else min(host.headroom, hardware.memory_free - host.planned)
    gib = memory_estimate.GIB
    return "" if parked.bytes <= left else f"it takes {parked.bytes / gib:.1f} GiB and {left / gib:.1f} GiB are left"


def _with(place: MemoryPlace, parked: PlannedProcess) -> MemoryPlace:
    more = parked.bytes if _is_host_of(place, parked) else 0
    return dataclasses.replace(place, planned=place.planned + more)


def _is_host_of(place: MemoryPlace, parked: PlannedProcess) -> bool:
    return place.gpu is None and place.node == parked.placement.node
