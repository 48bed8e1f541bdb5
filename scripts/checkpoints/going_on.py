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
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
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
    said: str
    facts: tuple[tuple[str, str], ...]
    made_with: Fingerprint | None
    needs_setup: bool = False
    good: bool = False
    before_step: int | None = None
    settings: tuple[str, ...] = ()
    is_finished: str = ""


def beginning(shelf: CheckpointCatalog, *, good: bool, before_step: int | None, command: Command) -> Beginning:
    """Raises CheckpointError: there is nothing to go on from, with the reason; ConfigError."""
    if not shelf.trial.is_ours:
        return _of_areal(shelf, good, before_step)
    config = composed(command)
    _check_same_run(config, shelf)
    prepared = _prepared(config, shelf)
    if prepared is not None and not good and before_step is None:
        return prepared
    if good or before_step is not None:
        return _chosen(shelf, good, before_step)
    if shelf.past.damage is not None:
        return _before_damage(shelf)
    return _newest(shelf, config)


def _check_same_run(config: RunConfig, shelf: CheckpointCatalog) -> None:
    """Raises ConfigError: the launch looks where its own settings say, below its own user's name."""
    starts, found = RunPaths.of(config).checkpoints, shelf.trial.paths.checkpoints
    if starts.resolve() != found.resolve():
        raise ConfigError(
            f"the command would go on with {starts}, not with {found}",
            "give it the same experiment_name, trial_name and cluster.fileroot, as the user who ran it",
        )


def composed(command: Command) -> RunConfig:
    """As the launch will compose it: paths begin where the command is typed. Raises ConfigError."""
    with _in_folder(command.folder):
        return compose(command.settings)


def _prepared(config: RunConfig, shelf: CheckpointCatalog) -> Beginning | None:
    """What is set up, with whatever settings: how they differ is told later."""
    if not shelf.trial.paths.recover_checkpoint.is_dir():
        return None
    found = find_prepared(config, shelf.trial.paths, any_settings=True)
    assert found is not None
    source = "" if found.record is None else f", from {found.record.source}"
    return Beginning(
        global_step=found.name.global_step,
        said=f"goes on from step {found.name.global_step}, as it was set up",
        facts=(("set up", f"{found.folder}{source}"),),
        made_with=found.manifest.config_fingerprint,
    )


def _before_damage(shelf: CheckpointCatalog) -> Beginning:
    """The last good one; where none is certified, the newest whole one from well before the damage."""
    try:
        return _chosen(shelf, True, None)
    except CheckpointError:
        return _chosen(shelf, False, _trusted_before(shelf))


def _trusted_before(shelf: CheckpointCatalog) -> int:
    """The onset is an estimate: the run itself leaves as many steps between."""
    assert shelf.past.damage is not None
    return shelf.past.damage.first_step - shelf.past.settings.onset_margin_steps


def _chosen(shelf: CheckpointCatalog, good: bool, before_step: int | None) -> Beginning:
    chosen = choose(shelf, good=good, before_step=before_step)
    what = "the last good one" if chosen.entry.standing is CheckpointStatus.GOOD else f"a {chosen.entry.standing}"
    assert chosen.entry.checkpoint.manifest is not None  # the store's own: others are not whole
    return Beginning(
        global_step=chosen.entry.global_step,
        said=f"goes on from step {chosen.entry.global_step}, {what}",
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
    return f"{entry.standing}: {entry.reason}; reward {reward(entry.reward)}; every file proven"


def _newest(shelf: CheckpointCatalog, config: RunConfig) -> Beginning:
    """What the launch takes by itself."""
    paths = shelf.trial.paths
    store = CheckpointStore(paths.default_checkpoints)
    found = store.latest_whole()
    memory = InMemoryCheckpoints(paths).newest_whole(store.list()) if config.recover.memory else None
    passed = tuple(("passed over", skipped.reason) for skipped in found.skipped)
    good = next((e for e in reversed(shelf.entries) if e.standing is CheckpointStatus.GOOD), None)
    told = ("last good", f"step {good.global_step}: {good.path}" if good else "none yet; no damage is known either")
    finished = already_finished(config, paths)
    if memory is not None and (found.checkpoint is None or memory.global_step > found.checkpoint.global_step):
        return Beginning(
            global_step=memory.global_step,
            said=f"goes on from step {memory.global_step}, the newest, in memory; no damage is known",
            facts=(("state", str(memory.folder)), told, *passed),
            made_with=memory.facts.config_fingerprint,
            is_finished=finished,
        )
    if found.checkpoint is None:
        why = "; ".join(skipped.reason for skipped in found.skipped) or "there is none at all"
        raise CheckpointError(
            f"{shelf.trial.name} has no whole checkpoint to go on from: {why}", "begin anew with another trial_name"
        )
    assert found.checkpoint.manifest is not None
    return Beginning(
        global_step=found.checkpoint.global_step,
        said=f"goes on from step {found.checkpoint.global_step}, the newest; no damage is known",
        facts=(("checkpoint", str(found.checkpoint.path)), told, *passed),
        made_with=found.checkpoint.manifest.config_fingerprint,
        is_finished=finished,
    )


# ── AReaL's ──


def _of_areal(shelf: CheckpointCatalog, good: bool, before_step: int | None) -> Beginning:
    """Its own recover folder where it fits; else an export, which has no optimizer."""
    if shelf.past.damage is not None and not good and before_step is None:
        try:
            return _of_areal(shelf, True, None)
        except CheckpointError:
            before_step = _trusted_before(shelf)
    try:
        chosen = choose(shelf, good=good, before_step=before_step)
    except CheckpointError:
        if not areal_setup.stays_as_it_is(shelf, before_step=before_step, good=good, than=0):
            raise
        return _areals_own(shelf)
    if areal_setup.stays_as_it_is(shelf, before_step=before_step, good=good, than=chosen.entry.global_step):
        return _areals_own(shelf)
    step = chosen.entry.global_step
    return Beginning(
        global_step=step,
        said=f"goes on from step {step}, an export: its weights with a fresh optimizer",
        facts=_facts(chosen),
        made_with=_written_settings(shelf.trial.logs / "config.yaml"),
        needs_setup=True,
        good=good,
        before_step=before_step,
        settings=(AREAL_RESUMES, areal_setup.NO_OPTIMIZER),
    )


def _areals_own(shelf: CheckpointCatalog) -> Beginning:
    info = shelf.recover_info
    assert info is not None and info.name is not None
    return Beginning(
        global_step=info.name.global_step,
        said=f"goes on from step {info.name.global_step}, AReaL's own recover folder, with its optimizer",
        facts=(("checkpoint", str(shelf.trial.areal_checkpoint)),),
        made_with=_written_settings(shelf.trial.logs / "config.yaml"),
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


def differences_of(shelf: CheckpointCatalog, begins: Beginning, command: Command) -> Sequence[Difference]:
    """Where the settings are not those that the checkpoint was made with. Raises ConfigError."""
    if begins.made_with is None:
        return ()
    if shelf.trial.is_ours:
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
