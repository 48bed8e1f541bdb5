"""The command that starts a run again: as recorded in its journal, with the settings that were changed since."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from launcher.base.own_python import python
from launcher.checkpoints.areal_log import launch_command
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.run_files.written_settings import read_settings, setting_of
from launcher.run_log.line_values import as_integer
from launcher.run_log.run_log import read_run_log
from scripts.checkpoints.areal_setup import NO_OPTIMIZER

ARGUMENTS = re.compile(r"\$@|\$\{@|\$\*|\$1")
LAUNCH = ("python", "-m", "launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`words` without `python -m launcher` are the settings. `folder`: where it was typed, and paths in it begin."""

    words: tuple[str, ...]
    folder: str

    @property
    def settings(self) -> tuple[str, ...]:
        return self.words[len(LAUNCH) :]

    def changed(self, settings: Sequence[str]) -> Self:
        """With other values of some settings; a later one of the same key would be refused, so it is replaced."""
        keys = {setting.partition("=")[0] for setting in settings}
        kept = [word for word in self.words if word.partition("=")[0] not in keys or "=" not in word]
        return replace(self, words=(*kept, *settings))

    def __str__(self) -> str:
        first = python() if self.words[0] == LAUNCH[0] else shlex.quote(self.words[0])
        return " ".join([first, *map(shlex.quote, self.words[1:])])

    @property
    def typed(self) -> str:
        """For a shell that may be in another folder."""
        return f"cd {shlex.quote(self.folder)} && {self}" if self.folder else str(self)


def recorded_command(trial: TrialFolder) -> Command | None:
    """The last launch's; None where the journal has none, as those of earlier versions."""
    launches = read_run_log(trial.paths, with_steps=False).launches
    launches.sort(key=lambda launch: as_integer(launch.get("attempt")) or 0)
    typed = (Command(words=_words(one.get("command")), folder=str(one.get("folder") or "")) for one in launches)
    found = deque((command for command in typed if command.words[: len(LAUNCH)] == LAUNCH), maxlen=1)
    return _of_this_place(found[0], trial) if found else None


def _words(command: object) -> tuple[str, ...]:
    """None of them where a damaged line has no command that a shell would take."""
    try:
        return tuple(shlex.split(command)) if isinstance(command, str) else ()
    except ValueError:
        return ()


def _of_this_place(command: Command, trial: TrialFolder) -> Command:
    """A run that was copied or moved is continued where it lies now, never where it came from."""
    written, paths = read_settings(trial.paths.config), trial.paths
    folder = command.folder
    if folder and not Path(folder).is_dir():
        folder = str(Path.cwd())
    now = {
        "experiment_name": paths.experiment_name,
        "trial_name": paths.trial_name,
        "cluster.fileroot": str(paths.fileroot.resolve()),
    }
    was = {key: str(setting_of(written, key)) for key in now}
    was["cluster.fileroot"] = str((Path(command.folder) / was["cluster.fileroot"]).resolve())
    settings = [f"{key}={value}" for key, value in now.items() if written and was[key] != value]
    return Command(words=command.words, folder=folder).changed(settings)


def next_command(trial: TrialFolder, *, has_optimizer: bool = True) -> str:
    if trial.is_ours:
        command = recorded_command(trial)
        return command.typed if command is not None else "the command that the run was started with, unchanged"
    more = "" if has_optimizer else f" {NO_OPTIMIZER}"
    started = launch_command(trial.logs) or "<the command that AReaL was started with>"
    return f"{started} recover.mode=auto{more}"


def lost_arguments(command: Command) -> str:
    """A shell script that the command runs and that does not hand its arguments on; "" where there is none."""
    for word in command.words[:3]:
        script = Path(command.folder) / word
        if word.endswith(".sh") and script.is_file():
            text = script.read_text(errors="replace")
            return "" if ARGUMENTS.search(text) else str(script)
    return ""
