"""Recommends from which checkpoint to resume, and by which command (P4: good, not latest)."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass

from launcher.base.messages import Cause, Incident
from launcher.config.supervision import RestoreConfig
from launcher.diagnosis.judging.causes import Guess
from launcher.diagnosis.reading.run_folders import FoundCheckpoint, RunFolders
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus, checkpoint_status
from launcher.policy.restore import choose

SETTINGS = RestoreConfig(begin_anew=False)
AREALS_COMMAND = "the command that started it"
"""No log of AReaL's contains it."""

CAUSES = {
    Guess.DEGRADATION: Cause.REWARD_COLLAPSE,
    Guess.REWARD_FUNCTION: Cause.VERIFIER_BROKEN,
    Guess.SERVER_CRASH: Cause.SERVER_CRASH,
    Guess.SERVER_HANG: Cause.SERVER_HANG,
    Guess.OUT_OF_MEMORY: Cause.SERVER_OOM,
    Guess.TRAINER_CRASH: Cause.TRAINER_CRASH,
}
"""As launcher/policy/restore.py knows them: a policy that degraded accuses the weights before the onset too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAdvice:
    """`checkpoint`: None where none is known that is old enough. `until`: the last step that can be trusted, None where
    nothing was damaged. `reason` as text; `commands` in order."""

    checkpoint: FoundCheckpoint | None
    until: int | None
    reason: str
    commands: tuple[str, ...]
    warning: str = ""


def advise_restore(
    folders: RunFolders, guess: Guess | None, *, earliest: int | None, is_sharp: bool, overrides: tuple[str, ...]
) -> RestoreAdvice:
    """`earliest`: the earliest step at which the damage may have begun, None where no step was trained on it.
    `is_sharp`: it began from one step to the next, so that no step before is suspect."""
    until = None
    if earliest is not None:
        first_damaged = earliest - 1 if guess in (Guess.DEGRADATION, None) else earliest
        margin = 0 if is_sharp and guess is not Guess.DEGRADATION else SETTINGS.onset_margin_steps
        until = first_damaged - 1 - margin
    chosen = _choose(folders.checkpoints, guess, earliest, is_sharp=is_sharp)
    if chosen is None:
        reason = _why_none(folders, until)
    else:
        place = ", the newest" if earliest is None else f", {earliest - chosen.global_step} steps before the onset"
        unseen = "" if chosen.on_disk else "; named by the log, not seen on this machine"
        reason = f"step {chosen.global_step}{place}{unseen}"
    return RestoreAdvice(
        checkpoint=chosen,
        until=until,
        reason=reason,
        commands=_commands(folders, chosen, until, overrides),
        warning=_warning(folders, chosen, until),
    )


def _choose(
    checkpoints: tuple[FoundCheckpoint, ...], guess: Guess | None, earliest: int | None, *, is_sharp: bool
) -> FoundCheckpoint | None:
    cause = CAUSES[guess] if guess else Cause.REWARD_COLLAPSE
    began_at_once = is_sharp and cause is not Cause.REWARD_COLLAPSE
    settings = dataclasses.replace(SETTINGS, onset_margin_steps=0) if began_at_once else SETTINGS
    facts = []
    for one in checkpoints:
        healthy_until = one.global_step + 98 if earliest is None else earliest - 1
        status = checkpoint_status(one.global_step, healthy_until=healthy_until, settings=settings).status
        facts.append(
            CheckpointFacts(
                global_step=one.global_step,
                policy_version=one.global_step + 1,
                status=CheckpointStatus.GOOD if began_at_once else status,
                is_complete=one.is_whole,
            )
        )
    incident = None
    if earliest is not None:
        incident = Incident(cause=cause, subject="run", reason="", since=0.0, onset_step=earliest)
    step = choose(facts, incident, (), settings).global_step
    return next((one for one in checkpoints if one.global_step == step and one.is_whole), None)


def _why_none(folders: RunFolders, until: int | None) -> str:
    limit = "" if until is None else f" of step {until} or earlier"
    if until is not None and until < 0:
        return "none can be: the damage is there from the beginning"
    if folders.looked_in:
        there = ", ".join(str(one.global_step) for one in folders.checkpoints[-8:]) or "none"
        return f"none{limit} in {folders.looked_in[0]} (there: {there})"
    return f"the checkpoints lie elsewhere: take the newest{limit}, or name their folder with --checkpoints"


def _commands(
    folders: RunFolders, chosen: FoundCheckpoint | None, until: int | None, overrides: tuple[str, ...]
) -> tuple[str, ...]:
    """What to type. It shows what it is going to do and asks. Where no step is damaged every launch takes the newest
    checkpoint by itself."""
    if until is not None and until < 0:
        return ()
    words = ["python -m scripts.resume_training", folders.flags]
    if until is not None:
        words.append(f"--before-step {(until if chosen is None else chosen.global_step) + 1}")
    if not folders.is_ours:
        words.append(f"--command {shlex.quote(AREALS_COMMAND)}")
    return (" ".join([*words, *map(shlex.quote, overrides)]),)


def _warning(folders: RunFolders, chosen: FoundCheckpoint | None, until: int | None) -> str:
    warnings, step = [], folders.recover_step
    if step is not None and until is not None and step > until:
        warnings.append(
            f"AReaL's recover_checkpoint is of step {step}, after the onset: resuming from it keeps the damage."
        )
    if chosen is not None and not folders.is_ours and until is not None:
        warnings.append("An export holds the model alone: resuming from it begins with a fresh optimizer.")
    return " ".join(warnings)
