"""The plan in few words: seats that are alike as one group, numbers in a row as a range. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from launcher.resources.capacity import RANK, node_name
from launcher.resources.memory_estimate import GIB, MIB
from launcher.resources.memory_places import ranges
from launcher.resources.run_plan import PlannedProcess, RunPlan


def alike(plan: RunPlan) -> list[list[PlannedProcess]]:
    """Processes of one kind that book and take the same, in the plan's order."""
    groups: dict[Hashable, list[PlannedProcess]] = {}
    for process in plan.processes:
        seat = process.seat
        same = (seat.kind, seat.n_nodes, len(seat.gpus), seat.share, seat.cpus, process.items)
        groups.setdefault(same, []).append(process)
    return list(groups.values())


def names(group: Sequence[PlannedProcess]) -> str:
    """`server-0`, or `server-0 … server-7`."""
    ends = [group[0].name] if len(group) == 1 else [group[0].name, group[-1].name]
    return " … ".join(ends)


def where(group: Sequence[PlannedProcess], plan: RunPlan) -> str:
    """On which GPUs of which nodes, and what share of each is booked."""
    seat = group[0].seat
    if not seat.gpus:
        numbers = sorted({process.seat.node for process in group})
        return "on the CPU" if plan.n_nodes == 1 else f"on the CPU of node {ranges(numbers)}"
    share = f", a share of {seat.share:g}" if seat.share < 1 else ""
    each = "" if len(group) == 1 else f", {'one' if len(seat.gpus) == 1 else len(seat.gpus)} each"
    nodes = sorted({process.seat.node for process in group})
    return "on " + " and ".join(_on_node(group, node, plan) for node in nodes) + each + share


def _on_node(group: Sequence[PlannedProcess], node: int, plan: RunPlan) -> str:
    gpus = sorted({gpu for process in group if process.seat.node == node for gpu in process.gpus})
    return f"GPU {ranges(gpus)}" + (f" of {node_name(node)}" if plan.n_nodes > 1 else "")


def who(group: Sequence[PlannedProcess], plan: RunPlan) -> str:
    """One line: who, where, GPUs and CPUs."""
    seat = group[0].seat
    count = f" ({len(group)} ranks)" if seat.kind == RANK and len(group) > 1 else ""
    cpus = f"CPUs: {seat.cpus:g}" + (" each" if len(group) > 1 else "")
    parts = f", {seat.n_nodes} nodes for one server" if seat.n_nodes > 1 else ""
    return f"{names(group)}{count}: {where(group, plan)}, {cpus}{parts}"


def amount(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"
