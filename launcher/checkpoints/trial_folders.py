"""Finds the folders of a trial below a fileroot, ours or AReaL's; or reports which name is wrong, and what exists.

    {fileroot}/checkpoints/{user}/{experiment}/{trial}/      ours, and AReaL's
    {fileroot}/checkpoints/{experiment}/{trial}/             a fork of AReaL, and its older layout
    {fileroot}/recover/{experiment}/{trial}/                 the same, for what it recovers from

Looking creates nothing; AReaL's own look for its recover folder makes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launcher.base.errors import StorageError, UsageError
from launcher.base.wording import some_of
from launcher.checkpoints.checkpoint_folder import CheckpointName
from launcher.checkpoints.manifest import MANIFEST_NAME
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.run_search import Names, choose_names

STEP_INFO = "step_info.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFolder:
    """`root` holds its checkpoints; `recover_info` is AReaL's, None where it has none. `is_ours`: this launcher's."""

    paths: RunPaths
    root: Path
    logs: Path
    recover_info: Path | None
    is_ours: bool

    @classmethod
    def of(cls, paths: RunPaths) -> Self:
        """Of a run of this launcher."""
        return cls(paths=paths, root=paths.checkpoints, logs=paths.logs, recover_info=None, is_ours=True)

    @property
    def name(self) -> str:
        return f"{self.paths.experiment_name}/{self.paths.trial_name}"

    @property
    def default(self) -> Path:
        """The folder of the actor's checkpoints."""
        inner = self.root / "default"
        return inner if inner.is_dir() or self.is_ours else self.root

    @property
    def areal_checkpoint(self) -> Path:
        """What AReaL recovers model and optimizer from."""
        return self.default / "recover_checkpoint"


def find_trial(fileroot: Path, user: str, experiment_name: str | None, trial_name: str | None) -> TrialFolder:
    """The trial of these names; where one is not given, the only one of the others. Raises UsageError naming what does
    not exist, and what does."""
    root = fileroot.expanduser().absolute()
    if not root.is_dir():
        nearest = next(parent for parent in root.parents if parent.is_dir())
        raise StorageError(
            f"there is no folder {root}; {nearest} holds {some_of(folders_in(nearest))}",
            "--fileroot is the cluster.fileroot of the run, the folder with checkpoints/ and logs/",
        )
    paths, found = None, list[Path]()
    if experiment_name and trial_name:
        paths = RunPaths(fileroot=root, user=user, experiment_name=experiment_name, trial_name=trial_name)
        found = [folder for folder in trial_roots(paths) if folder.is_dir()]
    if paths is None or not found:
        if not (root / "checkpoints").is_dir():
            raise StorageError(
                f"{root} has no folder checkpoints; it holds {some_of(folders_in(root))}",
                "--fileroot is the cluster.fileroot of the run; a run that has saved nothing yet has none",
            )
        wanted, below = (user, experiment_name, trial_name), root / "checkpoints"
        try:
            _, *named = choose_names(_trials(root), wanted, below)
        except UsageError:  # a run that has saved nothing yet is there too, and may be the one that is meant
            _, *named = choose_names(_trials(root, with_empty=True), wanted, below)
        paths = RunPaths(fileroot=root, user=user, experiment_name=named[0], trial_name=named[1])
        found = [folder for folder in trial_roots(paths) if folder.is_dir()]
    older_logs = root / "logs" / paths.experiment_name / paths.trial_name
    logs = next((folder for folder in (paths.logs, older_logs) if folder.is_dir()), paths.logs)
    return TrialFolder(
        paths=paths,
        root=found[0],
        logs=logs,
        recover_info=_recover_info([*found, trial_roots(paths)[-1]]),
        is_ours=found[0] == paths.checkpoints and _is_ours(paths),
    )


def trial_roots(paths: RunPaths) -> list[Path]:
    """Where its checkpoints may lie: ours and AReaL's, the older layout's, and what AReaL recovers from."""
    inner = Path(paths.experiment_name) / paths.trial_name
    return [paths.checkpoints, paths.fileroot / "checkpoints" / inner, paths.fileroot / "recover" / inner]


def _recover_info(roots: Sequence[Path]) -> Path | None:
    places = [place for root in roots for place in (root / "recover_info", root)]
    return next((place for place in places if (place / STEP_INFO).is_file()), None)


def _is_ours(paths: RunPaths) -> bool:
    return paths.events.is_file() or any(paths.default_checkpoints.glob(f"epoch*/{MANIFEST_NAME}"))


def _trials(root: Path, *, with_empty: bool = False) -> list[Names]:
    """Every folder that holds checkpoints, without a user in the older layout; `with_empty`: or that a run of ours has
    made for them."""
    top = root / "checkpoints"
    found = {
        folder.relative_to(top).parts
        for depth in ("*/*", "*/*/*")
        for folder in top.glob(depth)
        if folder.is_dir() and any(_looks_like_a_trial(inner) for inner in (folder, folder / "default"))
    }
    if with_empty:
        found |= {folder.parent.relative_to(top).parts for folder in top.glob("*/*/*/default") if folder.is_dir()}
    named = sorted(parts for parts in found if parts[-1] != "default")
    return [(parts[0] if len(parts) == 3 else "", parts[-2], parts[-1]) for parts in named]


def _looks_like_a_trial(folder: Path) -> bool:
    try:
        return any(
            CheckpointName.parse(path.name) or path.name in {"recover_checkpoint", "recover_info"}
            for path in folder.iterdir()
        )
    except OSError:
        return False


def found_below(folder: Path, name: str, *, levels: int = 5) -> list[Path]:
    """The files of that name, at most so many folders below. A folder that goes away meanwhile, as a live run's staged
    checkpoints do, is passed over; pathlib's glob raises there."""
    found = []
    for place, folders, files in os.walk(folder, followlinks=True):
        depth = len(Path(place).relative_to(folder).parts)
        if depth and name in files:
            found.append(Path(place, name))
        if depth == levels:
            folders.clear()
    return found


def folders_in(folder: Path) -> list[str]:
    """The names of its folders, without hidden ones; none where it can't be read."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
