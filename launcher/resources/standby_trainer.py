"""Adds the parked trainer to a plan: whether there is one, and what memory it takes, of each rank. Pure."""

from __future__ import annotations

import dataclasses

from launcher.config.schema import RunConfig
from launcher.resources import memory_estimate
from launcher.resources.hardware import Hardware
from launcher.resources.placement import RANK
from launcher.resources.run_plan import MemoryPlace, PlannedProcess, RunPlan, noted

STANDBY = "standby"
KEY = "recovery.standby_trainers"


def with_standby_trainer(config: RunConfig, hardware: Hardware, plan: RunPlan) -> RunPlan:
    """The plan with one beside each rank, where it was asked for, or where it was left to the plan and has room."""
    wanted = config.recovery.standby_trainers
    if wanted == 0:
        return plan
    ranks = [process for process in plan.processes if process.placement.kind == RANK]
    parked = tuple(_beside(rank, config, plan) for rank in ranks)
    why_not = _why_not(config, hardware, plan, parked)
    if wanted is None and why_not:
        return noted(plan, f"no trainer stands by: {why_not} ({KEY}=null)")
    places = tuple(dataclasses.replace(one, planned=one.planned + _bytes_on(one, parked)) for one in plan.places)
    how = "null: 1, as memory allows it" if wanted is None else "1"
    whose = "a second trainer process" if len(ranks) == 1 else f"a second process of each of {len(ranks)} trainer ranks"
    note = f"{whose}, parked once the trainer has loaded, takes over when the trainer ends ({KEY}={how})"
    processes = (*plan.processes, *parked)
    return dataclasses.replace(noted(plan, note), processes=processes, places=places, standby_trainers=1)


def _beside(rank: PlannedProcess, config: RunConfig, plan: RunPlan) -> PlannedProcess:
    on_gpu = bool(rank.placement.gpus)
    items = () if plan.shape is None else memory_estimate.standby_trainer(config, plan.shape, on_gpu=on_gpu)
    name = "standby trainer" if config.actor.dp_size == 1 else f"parked-{rank.placement.index}"
    placement = dataclasses.replace(rank.placement, name=name, kind=STANDBY, cpus=0, n_gpus=0, gpus=())
    return PlannedProcess(placement=placement, items=items)


def _why_not(config: RunConfig, hardware: Hardware, plan: RunPlan, parked: tuple[PlannedProcess, ...]) -> str:
    if config.cluster.address != "local" and not plan.is_described:
        return "the memory of a running cluster's machines is not known here"
    hosts = [place for place in plan.places if _bytes_on(place, parked)]
    if not hosts:
        return "its memory is not known before the model is here"
    for host in hosts:
        left = host.headroom if plan.is_described else min(host.headroom, hardware.memory_free - host.planned)
        takes, gib = _bytes_on(host, parked), memory_estimate.GIB
        if takes > left:
            if left < 0:
                return f"it takes {takes / gib:.1f} GiB, and {-left / gib:.1f} GiB are missing without it"
            return f"it takes {takes / gib:.1f} GiB and {left / gib:.1f} GiB are left"
    return ""


def _bytes_on(place: MemoryPlace, parked: tuple[PlannedProcess, ...]) -> int:
    """0 for a GPU: nothing is parked there."""
    return sum(one.bytes for one in parked if place.gpu is None and place.node == one.placement.node)
