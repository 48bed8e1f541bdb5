"""The plan as a person reads it: tables in a terminal, plain lines where the output is none."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from launcher.config import RunConfig
from launcher.memory_estimate import GIB, MIB
from launcher.plan import Place, Plan, Process, lacks


def show(config: RunConfig, plan: Plan, console: Console) -> None:
    """Print what runs where, its memory, and the notes."""
    lines = [*headline(config, plan)]
    if not console.is_terminal:
        lines += plain_lines(plan)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if console.is_terminal:
        console.print(_processes(plan))
        if plan.places:
            console.print(_places(plan))
    for note in (*plan.notes, *(f"too small: {problem}" for problem in lacks(plan))):
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def headline(config: RunConfig, plan: Plan) -> Iterator[str]:
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


def plain_lines(plan: Plan) -> Iterator[str]:
    for process in plan.processes:
        yield f"{process.name}: {where(process)}, CPUs: {process.cpus:g}{_total(process)}"
        for item in process.items:
            yield f"  {item.what}: {amount(item.bytes)} ({item.how})"
    for place in plan.places:
        yield f"{place.name}: {_account(place)}"


def where(process: Process) -> str:
    """On which GPUs, and what share of each is booked."""
    if not process.gpus:
        return "on the CPU"
    numbers = ", ".join(map(str, process.gpus))
    return f"on GPU {numbers}" + (f", a share of {process.share:g}" if process.share < 1 else "")


def amount(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"


def _total(process: Process) -> str:
    return f", {amount(process.bytes)}" if process.items else ""


def _account(place: Place) -> str:
    word = "headroom" if place.headroom >= 0 else "MISSING"
    return f"{amount(place.planned)} of {amount(place.capacity)}, {word} {amount(abs(place.headroom))}"


def _processes(plan: Plan) -> Table:
    table = Table("process", "where", "CPUs", "memory for", "size", "how")
    for process in plan.processes:
        table.add_section()
        head = (process.name, where(process), f"{process.cpus:g}")
        table.add_row(
            *head, "" if not process.items else "all of it", amount(process.bytes) if process.items else "?", ""
        )
        for item in process.items:
            table.add_row("", "", "", item.what, amount(item.bytes), item.how)
    return table


def _places(plan: Plan) -> Table:
    table = Table("memory of", "there", "planned", "headroom")
    for place in plan.places:
        style = "red" if place.headroom < 0 else ""
        table.add_row(place.name, amount(place.capacity), amount(place.planned), amount(place.headroom), style=style)
    return table
