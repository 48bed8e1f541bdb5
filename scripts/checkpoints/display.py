"""Shows checkpoints: as text, as a table, as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from launcher.checkpoints.checkpoint_catalog import CatalogEntry, CheckpointCatalog
from launcher.policy.checkpoint_status import CheckpointStatus, Damage
from launcher.reporting.formats import age

COLOURS = {
    CheckpointStatus.GOOD: "green",
    CheckpointStatus.CANDIDATE: "yellow",
    CheckpointStatus.CONDEMNED: "red",
    CheckpointStatus.UNVERIFIED: "dim",
}


def size(count: int) -> str:
    for unit, width in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count} B"


def reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def complete(entry: CatalogEntry) -> str:
    """`yes`: lengths and headers are right; `verified`: everything was read, and what was checked in it."""
    if entry.problem:
        return entry.problem.replace(f"{entry.path}/", "").replace(str(entry.path), "it")
    return "yes" if entry.verification is None else f"verified: {', '.join(entry.verification.checked)}"


def table(entries: Sequence[CatalogEntry], now: float) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "epoch", "age", "size", "reward"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    shown.add_column("complete", overflow="fold")
    shown.add_column("why", overflow="fold")
    for entry in entries:
        shown.add_row(
            str(entry.global_step),
            str(entry.checkpoint.name.epoch),
            age(now - entry.created_at),
            size(entry.bytes),
            reward(entry.reward),
            Text(entry.status, style=COLOURS[entry.status]),
            Text(complete(entry), style="red" if entry.problem else ""),
            Text(entry.reason),
        )
    return shown


def say_damage(damage: Damage) -> str:
    return (
        f"damage from about step {damage.onset_step} on ({damage.source}: {damage.reason}); "
        f"checkpoints of step {damage.first_step} and later hold it"
    )


def say_not_read(catalog: CheckpointCatalog) -> str:
    """The last line of every tool here; "" where all was read."""
    skipped = catalog.health.seen.passed_over
    return f"not read: {'; '.join(skipped)}" if skipped else ""


def entry_facts(entry: CatalogEntry, now: float) -> dict[str, object]:
    """One checkpoint as JSON; keys are only ever added."""
    name = entry.checkpoint.name
    found = entry.verification
    return {
        "step": name.global_step,
        "epoch": name.epoch,
        "epoch_step": name.epoch_step,
        "path": str(entry.path),
        "created_at": entry.created_at,
        "age_s": max(0.0, now - entry.created_at),
        "bytes": entry.bytes,
        "reward": entry.reward if entry.reward is not None and math.isfinite(entry.reward) else None,
        "state": str(entry.status),
        "reason": entry.reason,
        "complete": not entry.problem,
        "problem": entry.problem,
        "set_aside_as": entry.set_aside_as,
        "has_manifest": entry.checkpoint.manifest is not None,
        "has_optimizer": entry.has_optimizer,
        "verified": None if found is None else found.is_complete,
        "problems": [] if found is None else found.problems,
        "unknown": [] if found is None else found.unknown,
        "notes": [] if found is None else found.notes,
        "checked": [] if found is None else found.checked,
    }


def catalog_facts(catalog: CheckpointCatalog) -> dict[str, object]:
    trial, damage = catalog.trial, catalog.health.damage
    return {
        "format": "grpo-checkpoints/1",
        "experiment_name": trial.paths.experiment_name,
        "trial_name": trial.paths.trial_name,
        "user": trial.paths.user,
        "fileroot": str(trial.paths.fileroot),
        "folder": str(trial.default),
        "made_by": "grpo-launcher" if trial.is_ours else "AReaL",
        "not_read": list(catalog.health.seen.passed_over),
        "last_step": catalog.health.last_step if catalog.health.last_step >= 0 else None,
        "damage": None
        if damage is None
        else {
            "onset_step": damage.onset_step,
            "first_damaged_checkpoint": damage.first_step,
            "reason": damage.reason,
            "source": damage.source,
        },
    }
