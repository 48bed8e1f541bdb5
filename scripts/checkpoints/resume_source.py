"""What a run would resume from, and whether its settings fit that."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import CheckpointError, ConfigError
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint
from launcher.checkpoints.restore_request import asked_checkpoint
from launcher.checkpoints.resume_decision import already_finished
from launcher.config.compose import compose
from launcher.config.fingerprint import MEANINGS, Difference, Fingerprint, config_fingerprint, fingerprint_differences
from launcher.config.schema import RunConfig
from launcher.policy.checkpoint_status import CheckpointStatus
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of
from scripts.checkpoints.areal_setup import NO_OPTIMIZER
from scripts.checkpoints.choosing import Wanted, choose
from scripts.checkpoints.command import Command
from scripts.checkpoints.display import reward

AREAL_RESUMES = "recover.mode=auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSource:
    """`setup`: what must be set up first, since the launch itself would take something else. `settings`: what the
    command needs for it. `made_with`: the fingerprint that the settings must fit; None: it was not recorded."""

    summary: str
    global_step: int
    facts: tuple[tuple[str, str], ...]
    made_with: Fingerprint | None
    setup: Wanted | None = None
    settings: tuple[str, ...] = ()
    is_finished: str = ""


def find_source(catalog: CheckpointCatalog, wanted: Wanted, command: Command) -> ResumeSource:
    """Raises CheckpointError: there is nothing to resume from, with the reason; ConfigError."""
    if not catalog.trial.is_ours:
        return _chosen(catalog, wanted)
    config = composed(command)
    _check_same_run(config, catalog)
    prepared = _prepared(catalog)
    if wanted != Wanted() or (prepared is None and catalog.health.damage is not None):
        return _chosen(catalog, wanted)
    return prepared or _newest(catalog, config)


def _chosen(catalog: CheckpointCatalog, wanted: Wanted) -> ResumeSource:
    """What was asked for. Else, where damage is known, the last good one; where none is, the newest complete one from
    well before the damage, as far as that was seen. What nobody saw is taken only if it is named."""
    health = catalog.health
    if wanted == Wanted() and health.damage is not None:
        with contextlib.suppress(CheckpointError):
            return _source(catalog, Wanted(good=True))
        if health.unsure_until is None:
            raise _not_seen(catalog, health.not_known or "no step before the fall was seen healthy")
        wanted = Wanted(before_step=health.unsure_until + 1)
    elif wanted == Wanted() and not catalog.trial.is_ours and (why := health.not_known):
        raise _not_seen(catalog, why)
    return _source(catalog, wanted)


def _not_seen(catalog: CheckpointCatalog, why: str) -> CheckpointError:
    return CheckpointError(
        f"which checkpoint of {catalog.trial.name} is healthy can't be seen: {why}",
        f"bring the logs to {catalog.trial.logs}, or name one yourself: --before-step N",
    )


def _check_same_run(config: RunConfig, catalog: CheckpointCatalog) -> None:
    """Raises ConfigError: the launch searches the folder of its own settings, below its own user's name."""
    starts, found = RunPaths.of(config).checkpoints, catalog.trial.paths.checkpoints
    if starts.resolve() != found.resolve():
        raise ConfigError(
            f"the command would resume {starts}, not {found}",
            "give it the same experiment_name, trial_name and cluster.fileroot, as the user who ran it",
        )


def composed(command: Command) -> RunConfig:
    """As the launch will compose it: paths begin where the command is typed. Raises ConfigError."""
    with contextlib.chdir(command.folder if command.folder and Path(command.folder).is_dir() else "."):
        return compose(command.settings)


def _prepared(catalog: CheckpointCatalog) -> ResumeSource | None:
    """What is set up, with whatever settings: how they differ is reported later."""
    paths = catalog.trial.paths
    checkpoint = asked_checkpoint(paths)
    if checkpoint is None:
        return None
    return ResumeSource(
        summary=f"resumes from step {checkpoint.global_step}, as it was set up",
        global_step=checkpoint.global_step,
        facts=(("set up", f"{checkpoint.path}, in {paths.restore}"),),
        made_with=checkpoint.config_fingerprint,
    )


def _source(catalog: CheckpointCatalog, wanted: Wanted) -> ResumeSource:
    chosen, is_ours = choose(catalog, wanted), catalog.trial.is_ours
    if chosen is None:
        return _areals_own(catalog)
    entry = chosen.entry
    what = "the last good one" if entry.status is CheckpointStatus.GOOD else f"a {entry.status}"
    if not is_ours:
        what = "an export: its weights with a fresh optimizer"
    state = f"{entry.status}: {entry.reason}; reward {reward(entry.reward)}; every file verified"
    passed = tuple(("passed over", why) for why in chosen.passed_over)
    return ResumeSource(
        summary=f"resumes from step {entry.global_step}, {what}",
        global_step=entry.global_step,
        facts=(("checkpoint", str(entry.path)), ("state", state), *passed),
        made_with=entry.checkpoint.config_fingerprint if is_ours else _recorded_settings(catalog),
        setup=wanted,
        settings=() if is_ours else (AREAL_RESUMES, NO_OPTIMIZER),
    )


def _newest(catalog: CheckpointCatalog, config: RunConfig) -> ResumeSource:
    """What the launch takes by itself."""
    found = CheckpointCatalog.of_run(config, catalog.trial.paths).newest_to_resume()
    newest = found.checkpoint
    if newest is None:
        why = "; ".join(found.skipped) or "there is none at all"
        raise CheckpointError(
            f"{catalog.trial.name} has no complete checkpoint to resume from: {why}",
            "start over with another trial_name",
        )
    is_in_memory = isinstance(newest, InMemoryCheckpoint)
    good = catalog.last_good
    return ResumeSource(
        summary=f"resumes from step {newest.global_step}, the newest{', in memory' * is_in_memory}; no damage is known",
        global_step=newest.global_step,
        facts=(
            ("state" if is_in_memory else "checkpoint", str(newest.path)),
            ("last good", f"step {good.global_step}: {good.path}" if good else "none yet; no damage is known either"),
            *(("passed over", why) for why in found.skipped),
        ),
        made_with=newest.config_fingerprint,
        is_finished=already_finished(config, catalog.trial.paths),
    )


# ── AReaL's ──


def _areals_own(catalog: CheckpointCatalog) -> ResumeSource:
    info = catalog.recover_info
    assert info is not None
    assert info.name is not None
    return ResumeSource(
        summary=f"resumes from step {info.name.global_step}, AReaL's own recover folder, with its optimizer",
        global_step=info.name.global_step,
        facts=(("checkpoint", str(catalog.trial.areal_checkpoint)),),
        made_with=_recorded_settings(catalog),
        settings=(AREAL_RESUMES,),
    )


def _recorded_settings(catalog: CheckpointCatalog) -> Fingerprint | None:
    """Of what an AReaL run wrote down as its configuration; its keys are ours. None where there is none."""
    settings = read_settings(catalog.trial.logs / "config.yaml")
    found = {key: setting_of(settings, key) for key in MEANINGS}
    return {key: value for key, value in found.items() if isinstance(value, str | int)} if settings else None


# ── settings ──


def differences_of(catalog: CheckpointCatalog, source: ResumeSource, command: Command) -> Sequence[Difference]:
    """Where the settings are not those that the checkpoint was made with. Raises ConfigError."""
    if source.made_with is None:
        return ()
    if catalog.trial.is_ours:
        return fingerprint_differences(source.made_with, config_fingerprint(composed(command)))
    given = dict(word.split("=", 1) for word in command.words if "=" in word)
    then = {key: str(value) for key, value in source.made_with.items()}
    return fingerprint_differences(then, {key: given.get(key, value) for key, value in then.items()})
