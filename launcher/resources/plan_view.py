"""The plan as a person reads it, in a terminal and in a file: who is where, what memory goes to, what is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from launcher.config.schema import RunConfig
from launcher.resources.memory_places import places_alike
from launcher.resources.plan_wording import alike, amount, names, who
from launcher.resources.run_plan import RunPlan, lacks

WIDTH = 100
"""Where the output is no terminal."""


def plan_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def show(config: RunConfig, plan: RunPlan, console: Console) -> None:
    """Print what runs where, its memory, and the notes."""
    for line in (*headline(config, plan), *(who(group, plan) for group in alike(plan))):
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
    if plan.kv_tokens is not None:
        longest = plan.kv_tokens // generation.max_new_tokens
        yield f"each server holds {plan.kv_tokens:,} tokens: {longest:,} completions of full length at once"
    if plan.checkpoint_bytes:
        yield f"each checkpoint takes about {amount(plan.checkpoint_bytes)}"


def _memory(plan: RunPlan) -> Table:
    """By part, for each GPU of a process; on the CPU for the process."""
    table = _table("memory of each", "for", "size", "how")
    for group in alike(plan):
        on = f"{names(group)}{', of each GPU' if len(group[0].gpus) > 1 else ''}"
        for item in group[0].items:
            table.add_row(on if item is group[0].items[0] else "", item.what, amount(item.bytes), item.how)
        table.add_row("", "together", amount(group[0].bytes), "", style="bold", end_section=True)
    return table


def _places(plan: RunPlan) -> Table:
    table = _table("memory of", "there", "planned", "headroom")
    for name, place in places_alike(plan.places):
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
