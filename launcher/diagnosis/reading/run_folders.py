"""Finds which run it is, its settings and its checkpoints, from where the logs lie and what is in them.

Logs lie in `{fileroot}/logs/{user}/{experiment}/{trial}`, checkpoints in `{fileroot}/checkpoints/…` or, in older
layouts and forks, without the user, or below `recover/`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.checkpoints.areal_log import launch_command
from launcher.checkpoints.checkpoint_catalog import find_problem
from launcher.checkpoints.checkpoint_folder import CheckpointName, read_checkpoint
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.checkpoints.recorded_health import read_health
from launcher.checkpoints.trial_folders import trial_roots
from launcher.diagnosis.reading.log_records import Kind, LogEvent
from launcher.run_files.run_paths import RunPaths, names_of
from launcher.run_files.written_settings import read_settings

NAMED = ("experiment-name", "trial-name", "fileroot")
NAMES = re.compile(", ".join(rf"{name}=(?P<{name}>[^,\s]+)" for name in ("experiment_name", "trial_name", "fileroot")))
"""In the first line of AReaL's local launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCheckpoint:
    """`global_step`: the step that was done when it was made. `is_whole`: complete, as far as can be seen without
    reading it."""

    global_step: int
    path: str
    is_whole: bool = True
    problem: str = ""
    on_disk: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolders:
    """What was found around the logs. `flags` name the run for other scripts. `settings` by dotted keys.
    `is_ours`: of this launcher. `is_copy`: the files lie elsewhere than their run wrote them. `recover_step`: of
    AReaL's one recover checkpoint, which is overwritten. `health`: as the journal of a run of ours has it. `launched`:
    the command that AReaL was started with, where its logs have it."""

    flags: str
    is_ours: bool
    is_copy: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    checkpoints: tuple[SeenCheckpoint, ...] = ()
    looked_in: tuple[str, ...] = ()
    recover_step: int | None = None
    health: HealthEvidence | None = None
    launched: str = ""


def look_around(paths: Sequence[Path], log_events: Sequence[LogEvent], checkpoints: Path | None = None) -> RunFolders:
    """What lies around the files that were read. `checkpoints`: where the checkpoints lie, where that is known."""
    folders = list(dict.fromkeys((path if path.is_dir() else path.parent).absolute() for path in paths))
    folder, run = next(((one, run) for one in folders if (run := RunPaths.of_logs(one))), (None, None))
    settings = next((read for one in folders if (read := read_settings(one / "config.yaml"))), {})
    roots = [checkpoints] if checkpoints else [] if run is None else trial_roots(run)
    found = {one.path: one for root in roots for one in _checkpoints_in(root)}
    steps = {one.global_step for one in found.values()}
    logged = [one for one in _logged(log_events) if one.global_step not in steps]
    recover = [step for root in roots for step in _recover_steps(root)]
    is_ours = folder is not None and any((folder / name).exists() for name in ("metrics.jsonl", "events.jsonl"))
    return RunFolders(
        flags=_flags(log_events) if run is None else names_of(run),
        is_copy=run is None and bool(settings),
        is_ours=is_ours,
        health=read_health(run) if is_ours and run is not None else None,
        launched="" if is_ours else next(filter(None, map(launch_command, folders)), ""),
        settings=dict(_dotted("", settings)),
        checkpoints=tuple(sorted([*found.values(), *logged], key=lambda one: (one.global_step, not one.on_disk))),
        looked_in=tuple(str(root) for root in roots if root.is_dir()),
        recover_step=recover[0] if recover else None,
    )


def _flags(log_events: Sequence[LogEvent]) -> str:
    """The run's names as its log has them, of a launcher's line or of the path of a checkpoint; only where its fileroot
    is on this machine."""
    for event in log_events:
        if event.kind is Kind.RECOVER_RUN and (found := NAMES.search(event.text)) and Path(found["fileroot"]).is_dir():
            return " ".join(f"--{flag} {shlex.quote(found[flag.replace('-', '_')])}" for flag in NAMED)
    for event in log_events:
        *root, top, user, experiment, trial, default, _ = (*[""] * 6, *Path(str(event.facts.get("path") or "")).parts)
        is_one = event.kind is Kind.CHECKPOINT and (top, default) == ("checkpoints", "default") and any(root)
        if is_one and Path(*root).is_dir():
            paths = RunPaths(fileroot=Path(*root), user=user, experiment_name=experiment, trial_name=trial)
            return names_of(paths)
    return "--experiment-name EXPERIMENT --trial-name TRIAL"


def _dotted(prefix: str, tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _checkpoints_in(root: Path) -> Iterator[SeenCheckpoint]:
    for path in (*root.glob("*"), *root.glob("*/*")):
        name = CheckpointName.parse(path.name)
        if name is None or not path.is_dir() or path.parent.name == "set_aside":
            continue
        problem = find_problem(read_checkpoint(path, name))
        yield SeenCheckpoint(global_step=name.global_step, path=str(path), is_whole=not problem, problem=problem)


def _logged(log_events: Iterable[LogEvent]) -> Iterator[SeenCheckpoint]:
    """Checkpoints that a log names by their step and that may lie on another machine."""
    for event in log_events:
        text = str(event.facts.get("path") or event.facts.get("subject") or "")
        name = CheckpointName.parse(Path(text.rstrip("/.")).name)
        if event.kind is Kind.CHECKPOINT and name is not None:
            problem = "not seen on this machine"
            yield SeenCheckpoint(global_step=name.global_step, path=text, on_disk=False, problem=problem)


def _recover_steps(root: Path) -> Iterator[int]:
    """The step of AReaL's recover checkpoint: one copy, overwritten in place."""
    for path in (root / "recover_info" / "step_info.json", *root.glob("*/recover_info/step_info.json")):
        try:
            step = json.loads(path.read_text()).get("global_step")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(step, int):
            yield step
