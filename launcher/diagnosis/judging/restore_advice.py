"""Recommends from which checkpoint to resume, and by which command (P4: good, not latest)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from launcher.base.own_python import python
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.diagnosis.reading.run_folders import RunFolders, SeenCheckpoint

AREALS_COMMAND = "the command that started it"
"""No log of AReaL's contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAdvice:
    """`checkpoint`: None where none is known that is old enough. `until`: the last step that can be trusted, -1 where
    none can be, None where nothing was damaged. `reason` as text; `commands` in order."""

    checkpoint: SeenCheckpoint | None
    until: int | None
    reason: str
    commands: tuple[str, ...]
    warning: str = ""


def advise_restore(folders: RunFolders, health: HealthEvidence, overrides: tuple[str, ...]) -> RestoreAdvice:
    """By the evidence alone, whatever the cause: the same that every other tool takes."""
    until, whole = None, [one for one in folders.checkpoints if one.is_whole]
    chosen = whole[-1] if whole else None
    if health.damage is not None:
        limits = [limit for limit in (health.good_until, health.unsure_until) if limit is not None and limit >= 0]
        chosen = next((one for limit in limits for one in reversed(whole) if one.global_step <= limit), None)
        until = max(limits[:1], default=-1)
    if chosen is None:
        reason = _why_none(folders, health, until)
    else:
        last = health.last_good_step
        place = ", the newest" if until is None or last is None else f", {_beyond(health, chosen.global_step)}"
        unseen = "" if chosen.on_disk else "; named by the log, not seen on this machine"
        reason = f"step {chosen.global_step}{place}{unseen}"
    return RestoreAdvice(
        checkpoint=chosen,
        until=until,
        reason=reason,
        commands=_commands(folders, chosen, until, overrides),
        warning=_warning(folders, chosen, until),
    )


def _beyond(health: HealthEvidence, step: int) -> str:
    count = health.healthy_after(step)
    return f"{count} healthy step{'' if count == 1 else 's'} seen after it, up to step {health.last_good_step}"


def _why_none(folders: RunFolders, health: HealthEvidence, until: int | None) -> str:
    limit = "" if until is None else f" of step {until} or earlier"
    if until is not None and until < 0:
        why = health.not_known or f"the fall may have begun by step {health.last_good_step or 0}"
        return f"none was seen: {why}; give the earlier logs too"
    if folders.looked_in:
        there = ", ".join(str(one.global_step) for one in folders.checkpoints[-8:]) or "none"
        return f"none{limit} in {folders.looked_in[0]} (there: {there})"
    return f"the checkpoints lie elsewhere: take the newest{limit}, or name their folder with --checkpoints"


def _commands(
    folders: RunFolders, chosen: SeenCheckpoint | None, until: int | None, overrides: tuple[str, ...]
) -> tuple[str, ...]:
    """What to type. It shows what it is going to do and asks. Where no step is damaged every launch takes the newest
    checkpoint by itself."""
    if folders.is_copy or (until is not None and until < 0):
        return ()
    words = [f"{python()} -m scripts.resume_training", folders.flags]
    if until is not None:
        words.append(f"--before-step {(until if chosen is None else chosen.global_step) + 1}")
    if not folders.is_ours:
        words.append(f"--command {shlex.quote(folders.launched or AREALS_COMMAND)}")
    return (" ".join([*words, *map(shlex.quote, overrides)]),)


def _warning(folders: RunFolders, chosen: SeenCheckpoint | None, until: int | None) -> str:
    warnings, step = [], folders.recover_step
    if folders.is_copy:
        warnings.append("These files are a copy: run this again on the folder that the run itself wrote, to resume it.")
    if step is not None and until is not None and step > until:
        warnings.append(
            f"AReaL's recover_checkpoint is of step {step}, after the onset: resuming from it keeps the damage."
        )
    if chosen is not None and not folders.is_ours and until is not None:
        warnings.append("An export holds the model alone: resuming from it begins with a fresh optimizer.")
    return " ".join(warnings)
