"""Finds the run that a command is about, by the folder of its logs or by its names; or reports what exists."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.base.wording import some_of
from launcher.checkpoints.trial_folders import folders_in, found_below
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.run_search import choose_names, names_in, runs_below
from scripts.checkpoints.arguments import add_names
from scripts.run_processes import only_live_run


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="the run's logs folder (default: the only run, or the only live one)",
    )
    add_names(parser, trial_help="trial_name of the run; needed if the experiment has several")


def chosen_run(given: argparse.Namespace) -> RunPaths:
    """The run that was named, which has a folder of logs. Raises UsageError."""
    if given.logs is not None:
        if given.experiment_name or given.trial_name:
            raise UsageError("both a folder and names were given", "give one of them")
        return _of_folder(given.logs)
    return named_run(given)


def _of_folder(folder: Path) -> RunPaths:
    """`{fileroot}/logs/{user}/{experiment}/{trial}`, or any copy of such a folder that has a run's files."""
    folder = Path(os.path.normpath(folder.expanduser().absolute()))
    if folder.is_file():
        raise UsageError(f"{folder} is a file", f"give the folder that it lies in: {folder.parent}")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", f"{folder.parent} holds {some_of(folders_in(folder.parent))}")
    paths = RunPaths.of_logs(folder)
    if paths is None:
        below = sorted({file.parent for file in found_below(folder, "events.jsonl")})
        runs = [str(run) for run in below if RunPaths.of_logs(run) is not None]
        raise UsageError(
            f"{folder} is not …/logs/<user>/<experiment>/<trial>",
            f"give a run below it: {some_of(runs)}" if runs else "give that folder, or --experiment-name",
        )
    return paths


def named_run(given: argparse.Namespace) -> RunPaths:
    """By as many names as are needed; where none is given, the only live run is meant, if there is one."""
    fileroot = given.fileroot.expanduser().absolute()
    logs = fileroot / "logs"
    if not logs.is_dir():
        raise UsageError(f"--fileroot {given.fileroot}: {logs} is not there", "give the cluster.fileroot of the run")
    if not given.experiment_name and not given.trial_name:
        live = only_live_run(fileroot, given.user)
        if live is not None:
            return live
    there = [names_in(paths) for paths in runs_below(fileroot)]
    user, experiment, trial = choose_names(there, (given.user, given.experiment_name, given.trial_name), logs)
    return RunPaths(fileroot=fileroot, user=user, experiment_name=experiment, trial_name=trial)
