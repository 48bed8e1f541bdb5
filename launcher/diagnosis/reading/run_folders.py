"""Whose run it is, with which settings, and which checkpoints it has: from where the logs lie and what is in them.

Logs lie in `{fileroot}/logs/{user}/{experiment}/{trial}`, checkpoints in `{fileroot}/checkpoints/…` or, in older
layouts and forks, without the user, or below `recover/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from launcher.checkpoints.checkpoint_folder import CheckpointName, CheckpointState, read_checkpoint
from launcher.diagnosis.reading.log_records import Kind, LogEvent
from launcher.run_files.run_paths import RunPaths

WRITTEN_LAST = "tokenizer_config.json"
"""AReaL writes nothing atomically: this file is the last of an export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Of a run; empty where the place of its logs does not say them. `is_ours`: of this launcher."""

    fileroot: str = ""
    user: str = ""
    experiment: str = ""
    trial: str = ""
    is_ours: bool = False

    @property
    def flags(self) -> str:
        """As the other scripts take them."""
        known = (
            f"--experiment-name {self.experiment or 'EXPERIMENT'}",
            f"--trial-name {self.trial or 'TRIAL'}",
            f"--fileroot {self.fileroot}" if self.fileroot else "",
            f"--user {self.user}" if self.user else "",
        )
        return " ".join(filter(None, known))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint: the step that was done when it was made. `is_whole`: as far as can be seen without reading it."""

    global_step: int
    path: str
    is_whole: bool = True
    problem: str = ""
    on_disk: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolders:
    """What was found around the logs. `recover_step`: of AReaL's one recover checkpoint, which is overwritten."""

    names: Names
    settings: Mapping[str, object] = field(default_factory=dict)
    checkpoints: tuple[FoundCheckpoint, ...] = ()
    looked_in: tuple[str, ...] = ()
    recover_step: int | None = None
    steps_per_epoch: int | None = None


def look_around(paths: Sequence[Path], log_events: Iterable[LogEvent], checkpoints: Path | None = None) -> RunFolders:
    """What lies around the files that were read. `checkpoints`: where the checkpoints lie, where that is known."""
    folders = list(dict.fromkeys((path if path.is_dir() else path.parent).absolute() for path in paths))
    names = next((named for folder in folders if (named := _names_of(folder)).experiment), Names())
    settings = next((read for folder in folders if (read := _settings_in(folder))), {})
    if settings and not names.experiment:
        names = Names(experiment=str(settings.get("experiment_name", "")), trial=str(settings.get("trial_name", "")))
    roots = [checkpoints] if checkpoints else _roots(names)
    found = {one.path: one for root in roots for one in _checkpoints_in(root)}
    told = [one for one in _told(log_events) if one.path not in found and not _is_there(one, found.values())]
    recover = [step for root in roots for step in _recover_steps(root)]
    return RunFolders(
        names=names,
        settings=settings,
        checkpoints=tuple(sorted([*found.values(), *told], key=lambda one: (one.global_step, not one.on_disk))),
        looked_in=tuple(str(root) for root in roots if root.is_dir()),
        recover_step=recover[0] if recover else None,
    )


def _names_of(folder: Path) -> Names:
    """From `{fileroot}/logs/{user}/{experiment}/{trial}`."""
    is_ours = (folder / "metrics.jsonl").exists() or (folder / "events.jsonl").exists()
    paths = RunPaths.of_logs(folder)
    if paths is None:
        return Names(is_ours=is_ours)
    return Names(
        fileroot=str(paths.fileroot),
        user=paths.user,
        experiment=paths.experiment_name,
        trial=paths.trial_name,
        is_ours=is_ours,
    )


def _settings_in(folder: Path) -> dict[str, object]:
    """config.yaml by dotted keys; nothing where it is missing or can't be read: it only makes advice more exact."""
    try:
        loaded = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_dotted("", loaded)) if isinstance(loaded, dict) else {}


def _dotted(prefix: str, tree: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _roots(names: Names) -> list[Path]:
    if not names.fileroot:
        return []
    root, run = Path(names.fileroot), Path(names.experiment) / names.trial
    return [root / "checkpoints" / names.user / run, root / "checkpoints" / run, root / "recover" / run]


def _checkpoints_in(root: Path) -> Iterable[FoundCheckpoint]:
    for depth in ("*", "*/*"):
        for path in root.glob(depth):
            name = CheckpointName.parse(path.name)
            if name is not None and path.is_dir() and path.parent.name != "set_aside":
                yield _found_checkpoint(path, name)


def _found_checkpoint(path: Path, name: CheckpointName) -> FoundCheckpoint:
    found = read_checkpoint(path, name)
    problem = ""
    if found.state is CheckpointState.DAMAGED:
        problem = found.problem
    elif found.state is CheckpointState.UNVERIFIED and not (path / WRITTEN_LAST).exists():
        problem = f"{WRITTEN_LAST} is missing: it was not written to its end"
    return FoundCheckpoint(global_step=name.global_step, path=str(path), is_whole=not problem, problem=problem)


def _told(log_events: Iterable[LogEvent]) -> Iterable[FoundCheckpoint]:
    """Checkpoints that a log names by their step and that may lie on another machine."""
    for event in log_events:
        if event.kind is not Kind.CHECKPOINT:
            continue
        text = str(event.facts.get("path") or event.facts.get("subject") or "")
        name = CheckpointName.parse(Path(text.rstrip("/.")).name)
        if name is not None:
            yield FoundCheckpoint(
                global_step=name.global_step, path=text, on_disk=False, problem="not seen on this machine"
            )


def _is_there(told: FoundCheckpoint, found: Iterable[FoundCheckpoint]) -> bool:
    return any(one.global_step == told.global_step for one in found)


def _recover_steps(root: Path) -> Iterable[int]:
    """The step of AReaL's recover checkpoint: one copy, overwritten in place."""
    for path in (root / "recover_info" / "step_info.json", *root.glob("*/recover_info/step_info.json")):
        try:
            step = json.loads(path.read_text()).get("global_step")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(step, int):
            yield step
