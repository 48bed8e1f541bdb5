"""What a run would go on from, and whether its settings fit that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.base.errors import CheckpointError, ConfigError
from launcher.checkpoints.checkpoint_catalog import CatalogEntry, CheckpointCatalog
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint
from launcher.checkpoints.pending_restore import find_prepared
from launcher.checkpoints.resume_decision import already_finished
from launcher.config.compose import compose
from launcher.config.fingerprint import MEANINGS, Difference, Fingerprint, config_fingerprint, fingerprint_differences
from launcher.config.schema import RunConfig
from launcher.policy.checkpoint_status import CheckpointStatus
from launcher.run_files.run_paths import RunPaths
from scripts.checkpoints import areal_setup
from scripts.checkpoints.choosing import Chosen, choose
from scripts.checkpoints.command import Command
from scripts.checkpoints.sight import reward

AREAL_RESUMES = "recover.mode=auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """`needs_setup`: with `good` or `before_step`, since the launch itself would take something else. `settings`:
    what the command needs for it. `made_with`: the fingerprint that the settings must fit; None: nobody wrote one down.
    """

    global_step: int
    summary: str
    facts: tuple[tuple[str, str], ...]
    made_with: Fingerprint | None
    needs_setup: bool = False
    good: bool = False
    before_step: int | None = None
    settings: tuple[str, ...] = ()
    is_finished: str = ""


def beginning(catalog: CheckpointCatalog, *, good: bool, before_step: int | None, command: Command) -> Beginning:
    """Raises CheckpointError: there is nothing to go on from, with the reason; ConfigError."""
    if not catalog.trial.is_ours:
        return _of_areal(catalog, good, before_step)
    config = composed(command)
    _check_same_run(config, catalog)
    prepared = _prepared(config, catalog)
    if prepared is not None and not good and before_step is None:
        return prepared
    if good or before_step is not None:
        return _chosen(catalog, good, before_step)
    if catalog.health.damage is not None:
        return _before_damage(catalog)
    return _newest(catalog, config)


def _check_same_run(config: RunConfig, catalog: CheckpointCatalog) -> None:
    """Raises ConfigError: the launch looks where its own settings say, below its own user's name."""
    starts, found = RunPaths.of(config).checkpoints, catalog.trial.paths.checkpoints
    if starts.resolve() != found.resolve():
        raise ConfigError(
            f"the command would go on with {starts}, not with {found}",
            "give it the same experiment_name, trial_name and cluster.fileroot, as the user who ran it",
        )


def composed(command: Command) -> RunConfig:
    """As the launch will compose it: paths begin where the command is typed. Raises ConfigError."""
    with _in_folder(command.folder):
        return compose(command.settings)


def _prepared(config: RunConfig, catalog: CheckpointCatalog) -> Beginning | None:
    """What is set up, with whatever settings: how they differ is told later."""
    if not catalog.trial.paths.recover_checkpoint.is_dir():
        return None
    found = find_prepared(config, catalog.trial.paths, any_settings=True)
    assert found is not None
    source = "" if found.record is None else f", from {found.record.source}"
    return Beginning(
        global_step=found.name.global_step,
        summary=f"goes on from step {found.name.global_step}, as it was set up",
        facts=(("set up", f"{found.folder}{source}"),),
        made_with=found.manifest.config_fingerprint,
    )


def _before_damage(catalog: CheckpointCatalog) -> Beginning:
    """The last good one; where none is certified, the newest whole one from well before the damage."""
    try:
        return _chosen(catalog, True, None)
    except CheckpointError:
        return _chosen(catalog, False, _trusted_before(catalog))


def _trusted_before(catalog: CheckpointCatalog) -> int:
    """The onset is an estimate: the run itself leaves as many steps between."""
    assert catalog.health.damage is not None
    return catalog.health.damage.first_step - catalog.health.settings.onset_margin_steps


def _chosen(catalog: CheckpointCatalog, good: bool, before_step: int | None) -> Beginning:
    chosen = choose(catalog, good=good, before_step=before_step)
    what = "the last good one" if chosen.entry.status is CheckpointStatus.GOOD else f"a {chosen.entry.status}"
    assert chosen.entry.checkpoint.manifest is not None  # the store's own: others are not whole
    return Beginning(
        global_step=chosen.entry.global_step,
        summary=f"goes on from step {chosen.entry.global_step}, {what}",
        facts=_facts(chosen),
        made_with=chosen.entry.checkpoint.manifest.config_fingerprint,
        needs_setup=True,
        good=good,
        before_step=before_step,
    )


def _facts(chosen: Chosen) -> tuple[tuple[str, str], ...]:
    entry = chosen.entry
    passed = tuple(("passed over", why) for why in chosen.passed_over)
    return (("checkpoint", str(entry.path)), ("state", _state(entry)), *passed)


def _state(entry: CatalogEntry) -> str:
    return f"{entry.status}: {entry.reason}; reward {reward(entry.reward)}; every file proven"


def _newest(catalog: CheckpointCatalog, config: RunConfig) -> Beginning:
    """What the launch takes by itself."""
    found = CheckpointCatalog.of_run(config, catalog.trial.paths).newest_to_resume()
    newest = found.checkpoint
    if newest is None:
        why = "; ".join(found.skipped) or "there is none at all"
        raise CheckpointError(
            f"{catalog.trial.name} has no complete checkpoint to resume from: {why}",
            "begin anew with another trial_name",
        )
    is_in_memory = isinstance(newest, InMemoryCheckpoint)
    good = catalog.last_good
    return Beginning(
        global_step=newest.global_step,
        summary=f"goes on from step {newest.global_step}, the newest{', in memory' * is_in_memory}; no damage is known",
        facts=(
            ("state" if is_in_memory else "checkpoint", str(newest.path)),
            ("last good", f"step {good.global_step}: {good.path}" if good else "none yet; no damage is known either"),
            *(("passed over", why) for why in found.skipped),
        ),
        made_with=newest.config_fingerprint,
        is_finished=already_finished(config, catalog.trial.paths),
    )


# ── AReaL's ──


def _of_areal(catalog: CheckpointCatalog, good: bool, before_step: int | None) -> Beginning:
    """Its own recover folder where it fits; else an export, which has no optimizer."""
    if catalog.health.damage is not None and not good and before_step is None:
        try:
            return _of_areal(catalog, True, None)
        except CheckpointError:
            before_step = _trusted_before(catalog)
    try:
        chosen = choose(catalog, good=good, before_step=before_step)
    except CheckpointError:
        if not areal_setup.stays_as_it_is(catalog, before_step=before_step, good=good, than=0):
            raise
        return _areals_own(catalog)
    if areal_setup.stays_as_it_is(catalog, before_step=before_step, good=good, than=chosen.entry.global_step):
        return _areals_own(catalog)
    step = chosen.entry.global_step
    return Beginning(
        global_step=step,
        summary=f"goes on from step {step}, an export: its weights with a fresh optimizer",
        facts=_facts(chosen),
        made_with=_written_settings(catalog.trial.logs / "config.yaml"),
        needs_setup=True,
        good=good,
        before_step=before_step,
        settings=(AREAL_RESUMES, areal_setup.NO_OPTIMIZER),
    )


def _areals_own(catalog: CheckpointCatalog) -> Beginning:
    info = catalog.recover_info
    assert info is not None and info.name is not None
    return Beginning(
        global_step=info.name.global_step,
        summary=f"goes on from step {info.name.global_step}, AReaL's own recover folder, with its optimizer",
        facts=(("checkpoint", str(catalog.trial.areal_checkpoint)),),
        made_with=_written_settings(catalog.trial.logs / "config.yaml"),
        settings=(AREAL_RESUMES,),
    )


def _written_settings(file: Path) -> Fingerprint | None:
    """Of what an AReaL run wrote down as its configuration; its keys are ours. None where there is none."""
    try:
        content = yaml.safe_load(file.read_bytes())
    except (OSError, yaml.YAMLError):
        return None
    found = {key: _value(content, key) for key in MEANINGS}
    return {key: value for key, value in found.items() if isinstance(value, str | int)}


def _value(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


# ── settings ──


def differences_of(catalog: CheckpointCatalog, begins: Beginning, command: Command) -> Sequence[Difference]:
    """Where the settings are not those that the checkpoint was made with. Raises ConfigError."""
    if begins.made_with is None:
        return ()
    if catalog.trial.is_ours:
        return fingerprint_differences(begins.made_with, config_fingerprint(composed(command)))
    given = dict(word.split("=", 1) for word in command.words if "=" in word)
    now = {key: given.get(key, str(value)) for key, value in begins.made_with.items()}
    return fingerprint_differences({key: str(value) for key, value in begins.made_with.items()}, now)


@contextlib.contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    before = Path.cwd()
    try:
        if folder and Path(folder).is_dir():
            os.chdir(folder)
        yield
    finally:
        os.chdir(before)
