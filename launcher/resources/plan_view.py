"""Prints the plan of a run: where each process is, what takes its memory, and how much is left."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from launcher.base.wording import ranges
from launcher.config.recipe import describe_recipe
from launcher.config.schema import RunConfig
from launcher.resources.memory_estimate import GIB, MIB, learning
from launcher.resources.placement import RANK, node_name
from launcher.resources.run_plan import PlannedProcess, RunPlan, group_places, lacks

WIDTH = 100
"""Where the output is no terminal."""


def show(config: RunConfig, plan: RunPlan, console: Console) -> None:
    """Print what runs where, its memory, and the notes."""
    for line in (*headline(config, plan), *(process_line(group, plan) for group in group_alike(plan))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if plan.shape is not None:
        console.print(_memory(plan))
        console.print(_places(plan))
    cannot = [] if plan.shortage is None else [f"can't be placed: {plan.shortage}"]
    for note in (*plan.notes, *cannot, *(f"too small: {problem}" for problem in lacks(plan))):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def headline(config: RunConfig, plan: RunPlan) -> Iterator[str]:
    """The run, its model and its batch."""
    size = f", {plan.shape.parameters / 1e6:,.1f} M parameters" if plan.shape is not None else ""
    yield f"plan of {config.experiment_name}/{config.trial_name}, in {config.cluster.fileroot}"
    yield f"model {config.actor.path}{size}; served in {config.sglang.dtype}, trained in {config.actor.dtype}"
    generation = config.gconfig
    yield (
        f"each step: {config.train_dataset.batch_size} prompts of {config.train_dataset.path} "
        f"× {generation.n_samples} samples of at most {generation.max_new_tokens} tokens"
    )
    if config.rollout.episode is not None:
        rollout = config.rollout
        yield (
            f"each sample is an episode of {rollout.episode}: at most {rollout.max_turns} answers of the model, "
            f"{rollout.episode_timeout:g} s of its own code; no known answers check its rewards"
        )
    yield describe_recipe(config.actor)
    if config.actor.use_lora and plan.shape is not None:
        adapters, actor = learning(config.actor, plan.shape), config.actor
        names = [name for name in plan.shape.matrices if name in actor.adapted]
        yield (
            f"LoRA: adapters of rank {actor.lora_rank} on {', '.join(names)} learn, {adapters / 1e6:,.2f} M "
            "parameters; servers get them added to the model's own weights (actor.use_lora)"
        )
    if config.watch.port is not None:
        yield f"a page in the browser follows it, on port {config.watch.port} of its driver's loopback (watch.port)"
    if plan.kv_tokens is not None:
        longest = plan.kv_tokens // generation.max_new_tokens
        yield f"each server holds {plan.kv_tokens:,} tokens: {longest:,} completions of full length at once"
    if plan.checkpoint_bytes:
        yield f"each checkpoint takes about {amount(plan.checkpoint_bytes)}"


def _memory(plan: RunPlan) -> Table:
    """By part, for each GPU of a process; on the CPU for the process."""
    table = _table("memory of each", "for", "size", "how")
    for group in group_alike(plan):
        on = f"{names(group)}{', of each GPU' if len(group[0].placement.gpus) > 1 else ''}"
        for item in group[0].items:
            table.add_row(on if item is group[0].items[0] else "", item.what, amount(item.bytes), item.how)
        table.add_row("", "together", amount(group[0].bytes), "", style="bold", end_section=True)
    return table


def _places(plan: RunPlan) -> Table:
    table = _table("memory of", "there", "planned", "headroom")
    for name, place in group_places(plan.places):
        short = place.headroom < 0
        headroom = f"{'MISSING ' if short else ''}{amount(abs(place.headroom))}"
        table.add_row(name, amount(place.capacity), amount(place.planned), headroom, style="red" if short else "")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for column in columns:
        right = column in ("size", "there", "planned", "headroom")
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


def group_alike(plan: RunPlan) -> list[list[PlannedProcess]]:
    """Processes of one kind that reserve and use the same, in the plan's order."""
    groups: dict[Hashable, list[PlannedProcess]] = {}
    for process in plan.processes:
        where = process.placement
        same = (where.kind, len(where.gpus), where.share, where.cpus, process.items)
        groups.setdefault(same, []).append(process)
    return list(groups.values())


def names(group: Sequence[PlannedProcess]) -> str:
    """`server-0`, or `server-0 … server-7`."""
    first, last = group[0].placement.name, group[-1].placement.name
    return first if len(group) == 1 else f"{first} … {last}"


def where(group: Sequence[PlannedProcess], plan: RunPlan) -> str:
    """On which GPUs of which nodes, and what share of each is reserved."""
    placement = group[0].placement
    if not placement.gpus:
        numbers = sorted({process.placement.node for process in group})
        return "on the CPU" if plan.n_nodes == 1 else f"on the CPU of node {ranges(numbers)}"
    share = f", a share of {placement.share:g}" if placement.share < 1 else ""
    each = "" if len(group) == 1 else f", {'one' if len(placement.gpus) == 1 else len(placement.gpus)} each"
    nodes = sorted({process.placement.node for process in group})
    return "on " + " and ".join(_on_node(group, node, plan) for node in nodes) + each + share


def _on_node(group: Sequence[PlannedProcess], node: int, plan: RunPlan) -> str:
    gpus = sorted({gpu for process in group if process.placement.node == node for gpu in process.placement.gpus})
    return f"GPU {ranges(gpus)}" + (f" of {node_name(node)}" if plan.n_nodes > 1 else "")


def process_line(group: Sequence[PlannedProcess], plan: RunPlan) -> str:
    """One line: the processes, their GPUs and CPUs."""
    placement = group[0].placement
    count = f" ({len(group)} ranks)" if placement.kind == RANK and len(group) > 1 else ""
    cpus = f"CPUs: {placement.cpus:g}" + (" each" if len(group) > 1 else "")
    return f"{names(group)}{count}: {where(group, plan)}, {cpus}"


def amount(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"
