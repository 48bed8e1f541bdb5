"""The checkpoints of a trial as an operator sees them: each with its state, its rewards, and whether it is complete.

From the disk alone, so that it holds for a live run and for a dead one, for ours and for AReaL's. Cheap by itself
(names, lengths, headers); `prove` reads everything of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import CheckpointError, LauncherError, ModelError
from launcher.checkpoints.areal_folders import METADATA, RecoverInfo, read_recover_info
from launcher.checkpoints.areal_rewards import read_areal_rewards
from launcher.checkpoints.checkpoint_folder import Checkpoint, CheckpointState, check_checkpoint_sizes
from launcher.checkpoints.checkpoint_listing import list_folder
from launcher.checkpoints.checkpoint_store import SET_ASIDE
from launcher.checkpoints.model_files import find_shards
from launcher.checkpoints.recorded_health import RecordedHealth, read_past, seen_ever
from launcher.checkpoints.tensor_files import read_entries
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.checkpoints.verification import LAST_WRITTEN, Identity, Proof, verify
from launcher.config.supervision import RestoreConfig, RewardHealthConfig
from launcher.policy.checkpoint_status import CheckpointStatus, Damage, JudgedCheckpoint, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One checkpoint. `reward`: the mean around its step. `problem`: why it is not complete, "" where it is.
    `set_aside_as`: condemned, superseded or damaged, where the run took it out of its list. `proof`: where asked for.
    """

    checkpoint: Checkpoint
    created_at: float
    bytes: int
    reward: float | None
    standing: CheckpointStatus
    reason: str
    problem: str
    set_aside_as: str = ""
    proof: Proof | None = None

    @property
    def global_step(self) -> int:
        return self.checkpoint.global_step

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def is_vouched(self) -> bool:
        return self.checkpoint.manifest is not None or (self.proof is not None and self.proof.is_whole)

    @property
    def has_optimizer(self) -> bool:
        return self.checkpoint.manifest is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCatalog:
    """`entries`: the newest last. `recover_info`: AReaL's, None where there is none."""

    trial: TrialFolder
    past: RecordedHealth
    entries: tuple[CatalogEntry, ...]
    recover_info: RecoverInfo | None

    def proven(self, entry: CatalogEntry) -> CatalogEntry:
        """The same after everything of it was read."""
        proof = prove(self.trial, entry)
        return _judged(dataclasses.replace(entry, proof=proof, problem=proof.why_not), self.past)

    def entry_of(self, checkpoint: Checkpoint) -> CatalogEntry:
        """Of a folder that lies elsewhere."""
        return _entry(checkpoint, self.past)

    def would_be(self, entry: CatalogEntry) -> CheckpointStatus:
        """Its state, were its content proven."""
        return self.judged(entry).standing

    def judged(self, entry: CatalogEntry) -> JudgedCheckpoint:
        """The same with the reason."""
        return _judge(entry, self.past, is_vouched=True)

    def standing_of(self, global_step: int) -> CheckpointStatus:
        """Of a whole checkpoint of that step, if there were one."""
        return _judge_step(global_step, self.past, is_vouched=True, problem="", set_aside_as="").standing


def read_shelf(trial: TrialFolder) -> CheckpointCatalog:
    """Raises CheckpointError where a folder can't be listed."""
    past = read_past(trial.paths) if trial.is_ours else _areal_past(trial)
    found = [_entry(checkpoint, past) for checkpoint in (*list_folder(trial.default), *list_folder(_aside(trial)))]
    found.sort(key=lambda entry: (entry.global_step, not entry.set_aside_as, entry.created_at))
    info = None
    if trial.recover_info is not None:
        info = read_recover_info(trial.recover_info, trial.areal_checkpoint)
    return CheckpointCatalog(trial=trial, past=past, entries=tuple(found), recover_info=info)


def prove(trial: TrialFolder, entry: CatalogEntry) -> Proof:
    paths = trial.paths
    mine = Identity(experiment_name=paths.experiment_name, trial_name=paths.trial_name) if trial.is_ours else None
    return verify(entry.path, name=entry.checkpoint.name, identity=mine)


def _aside(trial: TrialFolder) -> Path:
    return trial.default / SET_ASIDE


def _areal_past(trial: TrialFolder) -> RecordedHealth:
    rewards, settings = read_areal_rewards(trial.logs), RewardHealthConfig()
    damage: Damage | None = seen_ever(rewards, settings)
    return RecordedHealth(rewards=rewards, damage=damage, settings=RestoreConfig(), reward_settings=settings)


def _entry(checkpoint: Checkpoint, past: RecordedHealth) -> CatalogEntry:
    manifest, files = checkpoint.manifest, _files(checkpoint.path)
    aside = checkpoint.path.name.partition(".")[2].partition("-")[0]
    reward = None if aside else past.reward_around(checkpoint.global_step)  # those steps were taken again by now
    if reward is None and manifest is not None:
        reward = manifest.reward_mean
    entry = CatalogEntry(
        checkpoint=checkpoint,
        created_at=max((made for _, made in files), default=0.0) if manifest is None else manifest.created_at,
        bytes=sum(size for size, _ in files),
        reward=reward,
        standing=CheckpointStatus.UNVERIFIED,
        reason="",
        problem=_problem(checkpoint),
        set_aside_as=aside,
    )
    return _judged(entry, past)


def _judged(entry: CatalogEntry, past: RecordedHealth) -> CatalogEntry:
    found = _judge(entry, past, is_vouched=entry.is_vouched)
    return dataclasses.replace(entry, standing=found.standing, reason=found.reason)


def _judge(entry: CatalogEntry, past: RecordedHealth, *, is_vouched: bool) -> JudgedCheckpoint:
    problem, aside = entry.problem, entry.set_aside_as
    return _judge_step(entry.global_step, past, is_vouched=is_vouched, problem=problem, set_aside_as=aside)


def _judge_step(
    global_step: int, past: RecordedHealth, *, is_vouched: bool, problem: str, set_aside_as: str
) -> JudgedCheckpoint:
    return judge(
        global_step,
        is_vouched=is_vouched,
        problem=problem,
        set_aside_as=set_aside_as,
        damage=past.damage,
        last_step=past.last_step,
        settings=past.settings,
    )


def _files(folder: Path) -> list[tuple[int, float]]:
    """Length and time of each; a live run may remove some while they are looked at."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if not path.is_dir():
                found.append((stat.st_size, stat.st_mtime))
    return found


def _problem(checkpoint: Checkpoint) -> str:
    """Why a checkpoint can't be complete, from lengths and headers alone; "" where nothing speaks against it."""
    try:
        match checkpoint.state:
            case CheckpointState.COMMITTED:
                check_checkpoint_sizes(checkpoint.path)
            case CheckpointState.DAMAGED:
                return checkpoint.problem
            case CheckpointState.UNVERIFIED:
                _check_export(checkpoint.path)
    except LauncherError as error:
        return error.message
    return ""


def _check_export(folder: Path) -> None:
    """Raises CheckpointError, ModelError."""
    if (folder / METADATA).exists():
        raise CheckpointError(f"{folder} is a DCP folder, not a model")
    for name in ("config.json", LAST_WRITTEN):
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing: the export was cut short")
    for shard in find_shards(folder):
        read_entries(shard)
