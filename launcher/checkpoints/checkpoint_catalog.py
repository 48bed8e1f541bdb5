"""The catalog of a run's checkpoints: the one place that decides which are good, and which is the newest that fits.

The run, retention and every tool of the operator use it. The run gives the step up to which it was judged healthy; a
tool gives the evidence that it read from files (health_evidence.py), whether the run is alive or dead, ours or AReaL's.
Both use launcher/policy/checkpoint_status.py. It checks names, lengths and headers; `verified` reads everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launcher.base.errors import LauncherError
from launcher.checkpoints.areal_folders import RecoverInfo, check_export, read_recover_info
from launcher.checkpoints.checkpoint_folder import (
    Checkpoint,
    CheckpointName,
    CheckpointState,
    check_checkpoint_sizes,
    list_folder,
)
from launcher.checkpoints.checkpoint_store import SET_ASIDE, CheckpointStore
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoint, InMemoryCheckpoints
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.checkpoints.verification import Identity, Verification, compare_with_neighbours, verify
from launcher.config.schema import RunConfig
from launcher.policy.checkpoint_status import (
    CheckpointFacts,
    CheckpointStatus,
    checkpoint_status,
    newest_first,
    worth_keeping,
)
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of
from launcher.run_log.run_log import read_run_log

Damaged = Mapping[int, Set[float]]
"""Of each step, when those were made that could not be loaded: one that is made again after a restore is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One checkpoint. `reward`: the mean around its step. `problem`: why it is not complete, "" where it is.
    `set_aside_as`: condemned, superseded or damaged, where the run took it out of its list. `verification`: where it
    was asked for."""

    checkpoint: Checkpoint
    created_at: float
    bytes: int
    reward: float | None
    status: CheckpointStatus = CheckpointStatus.UNVERIFIED
    reason: str = ""
    problem: str
    set_aside_as: str = ""
    verification: Verification | None = None

    @property
    def global_step(self) -> int:
        return self.checkpoint.global_step

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def is_vouched(self) -> bool:
        return self.has_optimizer or (self.verification is not None and self.verification.is_complete)

    @property
    def has_optimizer(self) -> bool:
        return self.checkpoint.manifest is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestToResume:
    """What a launch would resume from by itself. `skipped`: why newer ones were not taken."""

    checkpoint: Checkpoint | InMemoryCheckpoint | None
    skipped: tuple[str, ...]


class CheckpointCatalog:
    """The checkpoints of one trial, and the states in this machine's memory. Reading them changes nothing."""

    def __init__(self, trial: TrialFolder, health: HealthEvidence, *, use_memory: bool = True) -> None:
        self.trial = trial
        self.health = health
        self._store = CheckpointStore(trial.default)
        self._memory = InMemoryCheckpoints(trial.paths) if use_memory and trial.is_ours else None

    @classmethod
    def of_run(cls, config: RunConfig, paths: RunPaths) -> Self:
        """For the run itself, which knows its health better than its files do."""
        health = HealthEvidence(settings=config.restore)
        return cls(TrialFolder.of(paths), health, use_memory=config.recover.memory)

    # ── for the run ──

    def status_at(self, global_step: int, healthy_until: int) -> CheckpointStatus:
        """`healthy_until`: the last step that the run judged healthy."""
        return checkpoint_status(global_step, healthy_until=healthy_until, settings=self.health.settings).status

    def facts(self, healthy_until: int, damaged: Damaged | None = None) -> tuple[CheckpointFacts, ...]:
        """Of each that a restore may choose: committed and not condemned, on the disk, or in memory where the disk does
        not hold its step. Raises CheckpointError and JournalError where the disk can't be read."""
        checkpoints, bad = self._store.list(), damaged or {}
        made = [(one.global_step, one.manifest.created_at) for one in checkpoints if one.manifest]
        incomplete = {step for step, at in made if at in bad.get(step, ())}
        on_disk = self._facts_on_disk(checkpoints, healthy_until, incomplete)
        held = {facts.global_step for facts in on_disk if facts.is_complete}
        in_memory = [
            CheckpointFacts(
                global_step=state.global_step,
                status=self.status_at(state.global_step, healthy_until),
                is_complete=state.created_at not in bad.get(state.global_step, ()),
                in_memory=True,
            )
            for state in self._in_memory(checkpoints)
            if state.global_step not in held
        ]
        return (*on_disk, *in_memory)

    def _facts_on_disk(
        self, checkpoints: Sequence[Checkpoint], healthy_until: int, incomplete: Set[int]
    ) -> list[CheckpointFacts]:
        return [
            CheckpointFacts(
                global_step=one.global_step,
                status=self.status_at(one.global_step, healthy_until),
                is_complete=one.global_step not in incomplete,
                reward=one.manifest.reward_mean,
            )
            for one in checkpoints
            if one.manifest is not None
        ]

    def worth_sparing(self, keep_last: int, *, healthy_until: int) -> frozenset[int]:
        """The steps that retention must leave alone. The newest checkpoints are too young to be trusted when damage is
        found: by age alone, every one from before it would be deleted (P4). One whose files are not in their length
        protects nothing, so it is not counted among those that stay."""
        checkpoints = self._store.list()
        torn = {one.global_step for one in checkpoints if one.manifest is not None and find_problem(one)}
        return worth_keeping(self._facts_on_disk(checkpoints, healthy_until, torn), keep_last)

    def made_at(self, global_step: int) -> tuple[float, ...]:
        """When what there is of this step was made, on the disk and in memory. Raises as `facts`."""
        checkpoints = self._store.list()
        on_disk = [one.manifest.created_at for one in checkpoints if one.global_step == global_step and one.manifest]
        in_memory = [one.created_at for one in self._in_memory(checkpoints) if one.global_step == global_step]
        return (*on_disk, *in_memory)

    def condemn_after(self, global_step: int, is_over: Callable[[], bool] = lambda: False) -> tuple[str, ...]:
        """Set aside what holds damage; returns the new names of the checkpoints. `is_over`: asked before each, whether
        the order has been given up meanwhile, since the disk stalled. Raises CheckpointError, then TimeoutError too."""

        def go_on(target: Path) -> None:
            if is_over():
                raise TimeoutError(f"{target} stays: the order was given up")

        go_on(self.trial.default)
        self.forget_after(global_step)
        return tuple(path.name for path in self._store.condemn_after(global_step, go_on))

    def reinstate_after(self, global_step: int) -> tuple[str, ...]:
        """Undo the last restore from an onset, which was to this step: what it set aside is back; returns the names.
        Raises CheckpointError and JournalError."""
        self.forget_after(global_step)
        aside = self.trial.default / SET_ASIDE
        names = set_aside_by_restore(self.trial.paths, sorted(path.name for path in aside.glob("*")))
        return tuple(path.name for path in self._store.reinstate(global_step, names))

    def forget_after(self, global_step: int) -> None:
        """Drop states in memory that hold damage: no later attempt may resume from them."""
        if self.trial.is_ours:  # also where this launch does not use them: the next one may
            InMemoryCheckpoints(self.trial.paths).drop_after(global_step)

    def newest_model(self, damaged: Damaged) -> Checkpoint | None:
        """The checkpoint on the disk that a server may start from."""
        on_disk = [facts for facts in self.facts(-1, damaged) if facts.is_complete and not facts.in_memory]
        newest = next(iter(newest_first(on_disk)), None)
        return None if newest is None else self._store.find(newest.global_step)

    def newest_to_resume(self) -> NewestToResume:
        """The newest checkpoint that is verified complete now, or a newer state in memory. Raises CheckpointError."""
        found, in_memory = self._store.latest_complete(), self.newest_in_memory()
        checkpoint: Checkpoint | InMemoryCheckpoint | None = found.checkpoint
        if in_memory is not None and (checkpoint is None or in_memory.global_step > checkpoint.global_step):
            checkpoint = in_memory
        return NewestToResume(checkpoint=checkpoint, skipped=found.skipped)

    def newest_in_memory(self) -> InMemoryCheckpoint | None:
        """The newest state in memory that counts and is verified complete now."""
        return None if self._memory is None else self._memory.newest_complete(self._store.list())

    def _in_memory(self, checkpoints: Sequence[Checkpoint]) -> Sequence[InMemoryCheckpoint]:
        return () if self._memory is None else self._memory.current(checkpoints)

    # ── for the tools ──

    @functools.cached_property
    def entries(self) -> tuple[CatalogEntry, ...]:
        """All, also those that were set aside, the newest last. Raises CheckpointError where a folder can't be read."""
        folder = self.trial.default
        found = [self.entry_of(one) for one in (*self._store.list(), *list_folder(folder / SET_ASIDE))]
        return tuple(sorted(found, key=lambda one: (one.global_step, not one.set_aside_as, one.created_at)))

    @property
    def last_good(self) -> CatalogEntry | None:
        """As far as it is known without reading any."""
        return next(iter(newest_first(self.entries, good=True)), None)

    @functools.cached_property
    def recover_info(self) -> RecoverInfo | None:
        """AReaL's, where there is one."""
        if self.trial.recover_info is None:
            return None
        updates = setting_of(read_settings(self.trial.logs / "config.yaml"), "actor.ppo_n_minibatches")
        return read_recover_info(
            self.trial.recover_info, self.trial.areal_checkpoint, updates=updates if isinstance(updates, int) else None
        )

    def entry_of(self, checkpoint: Checkpoint) -> CatalogEntry:
        """Of a folder, which may lie elsewhere."""
        manifest, files = checkpoint.manifest, _files(checkpoint.path)
        aside = checkpoint.path.name.partition(".")[2].partition("-")[0]
        reward = None if aside else self.health.reward_around(checkpoint.global_step)  # aside: steps taken again by now
        entry = CatalogEntry(
            checkpoint=checkpoint,
            created_at=max((made for _, made in files), default=0.0) if manifest is None else manifest.created_at,
            bytes=sum(size for size, _ in files),
            reward=manifest.reward_mean if reward is None and manifest is not None else reward,
            problem=find_problem(checkpoint),
            set_aside_as=aside,
        )
        return self._judged(entry)

    def verified(self, entry: CatalogEntry) -> CatalogEntry:
        """The same after everything of it was read."""
        paths, is_ours = self.trial.paths, self.trial.is_ours
        mine = Identity(experiment_name=paths.experiment_name, trial_name=paths.trial_name) if is_ours else None
        found = verify(entry.path, name=entry.checkpoint.name, identity=mine)
        if found.is_complete and len(neighbours := self._neighbours(entry)) > 1:
            compare_with_neighbours(found, neighbours, global_step=entry.global_step)
        return self._judged(dataclasses.replace(entry, verification=found, problem=found.why_not))

    def _neighbours(self, entry: CatalogEntry) -> dict[int, Path]:
        """Of the two other steps that are the nearest to its own, on both sides where there are such."""
        others = [one for one in self.entries if not one.problem and not one.set_aside_as]
        older = [one for one in others if one.global_step < entry.global_step]
        newer = [one for one in others if one.global_step > entry.global_step]
        nearest = [*older[-1:], *newer[:1]] if older and newer else [*older[-2:], *newer[:2]]
        return {one.global_step: one.path for one in nearest}

    def presumed(self, entry: CatalogEntry) -> CatalogEntry:
        """The same with the status that it has if its content is verified as sound."""
        return self._judged(entry, is_vouched=True)

    def newest_first(
        self, *, before_step: int | None = None, good: bool = False, condemned: bool = False
    ) -> list[CatalogEntry]:
        """What may be restored if its content is verified as sound, the newest first; nothing that was set aside."""
        found = [self.presumed(entry) for entry in self.entries if not entry.set_aside_as]
        return newest_first(found, before_step=before_step, good=good, condemned=condemned)

    def _judged(self, entry: CatalogEntry, *, is_vouched: bool = False) -> CatalogEntry:
        found = self.health.status_of(
            entry.global_step,
            is_vouched=is_vouched or entry.is_vouched,
            problem=entry.problem,
            set_aside_as=entry.set_aside_as,
        )
        return dataclasses.replace(entry, status=found.status, reason=found.reason)


def set_aside_by_restore(paths: RunPaths, lying: Sequence[str] = ()) -> list[str]:
    """Names below set_aside/ of what the last restore from an onset took out of the list.

    `lying`: what is below set_aside/. One that it condemned is among the names too where no event says so: the
    Coordinator was killed, or a later one could not be moved, before it was written down.
    """
    aside = read_run_log(paths, with_steps=False).set_aside
    unnamed = (one for one in lying if one not in aside.known and _is_condemned(one, aside.condemned_after))
    return [*aside.names, *unnamed]


def _is_condemned(name: str, after_step: int | None) -> bool:
    found = CheckpointName.parse(name.partition(".")[0])
    is_later = found is not None and after_step is not None and found.global_step > after_step
    return is_later and ".condemned-" in name


def _files(folder: Path) -> list[tuple[int, float]]:
    """Length and time of each; a live run may remove some while they are read."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if not path.is_dir():
                found.append((stat.st_size, stat.st_mtime))
    return found


def find_problem(checkpoint: Checkpoint) -> str:
    """Why a checkpoint can't be complete, from lengths and headers alone; "" where nothing speaks against it."""
    try:
        match checkpoint.state:
            case CheckpointState.COMMITTED:
                check_checkpoint_sizes(checkpoint.path)
            case CheckpointState.DAMAGED:
                return checkpoint.problem
            case CheckpointState.UNVERIFIED:
                check_export(checkpoint.path)
    except LauncherError as error:
        return error.message
    return ""
