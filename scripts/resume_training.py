"""Resumes a run, guided: what it resumes from, whether the settings fit, the exact command; asks, and runs it.

`python -m scripts.resume_training --help`; see docs/checkpoints.md. The run takes this process's place, so its exit
code and Ctrl-C are the run's own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import CheckpointError, ConfigError
from launcher.base.own_python import python
from launcher.checkpoints.areal_log import launch_command
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.config.fingerprint import Difference
from launcher.run_files.run_paths import names_of
from scripts.checkpoints.arguments import NOTHING_FITS, Parser, add_trial, step, trial_of
from scripts.checkpoints.choosing import Wanted, read_catalog
from scripts.checkpoints.command import Command, lost_arguments, recorded_command
from scripts.checkpoints.display import say_damage, say_not_read
from scripts.checkpoints.resume_source import ResumeSource, differences_of, find_source
from scripts.checkpoints.trial_lock import held
from scripts.ending import DONE, WRONG, ended
from scripts.setup_recovery import set_up

NAME = "resume_training"
EXAMPLES = {
    True: "'python -m launcher conf=… …'",
    False: "'python3 -m areal.launcher.local <script>.py --config <file>.yaml …'",
}
EXIT_CODES = (
    "those of the run, where it was started; 0 there was nothing to do; 1 there is nothing to resume from, or the "
    "answer was no; 2 the settings do not fit the checkpoint, the run is running, or the command is wrong"
)


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _resume(parser().parse_intermixed_args(arguments)), refused=NOTHING_FITS, unread=NOTHING_FITS)


def parser() -> argparse.ArgumentParser:
    made = Parser(NAME, "Resume a run: choose, check, show the command, ask, run it.", EXIT_CODES)
    add_trial(made)
    which = made.add_argument_group(
        "from which checkpoint (default: the newest; the last good one where damage is known)"
    )
    one = which.add_mutually_exclusive_group()
    one.add_argument("--good", action="store_true", help="the newest good checkpoint")
    one.add_argument("--before-step", type=step, metavar="N", help="the newest complete checkpoint of a step before N")
    made.add_argument("--yes", action="store_true", help="don't ask: set up and run")
    made.add_argument(
        "--command",
        metavar="TEXT",
        help="the command that started the run, if its journal does not contain it (AReaL's)",
    )
    made.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings to change, e.g. sglang.mem_fraction_static=0.7"
    )
    return made


def _resume(given: argparse.Namespace) -> int:
    trial = trial_of(given)
    with held(trial, NAME):  # a run that is running can't be resumed
        catalog = read_catalog(trial)
        command = _command(given, trial)
        source = find_source(catalog, Wanted(good=given.good, before_step=given.before_step), command)
        _show(catalog, source)
        if source.is_finished:
            print(source.is_finished)
            return DONE
        differences = differences_of(catalog, source, command)
        if differences:
            return _refuse(source, differences)
        print(f"settings    {_fit(catalog, source)}")
        runs = command.changed(source.settings)
        print(f"command     {set_up_first(trial, source.setup)}{runs.typed}")
        if (added := runs.words[len(command.words) :]) and (script := lost_arguments(runs)):
            _say_lost(script, added, yes=given.yes)
        if not given.yes and not _agreed():
            print("nothing was changed, nothing was started")
            return NOTHING_FITS
        if source.setup is not None:
            _, lines = set_up(catalog, source.setup)
            print("\n".join(lines[:2]))
    return _run(runs)


def set_up_first(trial: TrialFolder, wanted: Wanted | None) -> str:
    """What a person who types the command types before it: the launch alone would take the newest checkpoint."""
    if wanted is None:
        return ""
    choice = "--good" if wanted.good else f"--before-step {wanted.before_step}"
    return f"{python()} -m scripts.setup_recovery {names_of(trial.paths)} {choice} && "


def _command(given: argparse.Namespace, trial: TrialFolder) -> Command:
    """Raises ConfigError where it is not known."""
    if given.command:
        command: Command | None = Command(words=_words(given.command), folder=str(Path.cwd()))
    else:
        command = recorded_command(trial) if trial.is_ours else None
    if command is None:
        journal, settings = trial.paths.events, trial.logs / "config.yaml"
        unsaid = "does not say it" if trial.is_ours else f"is not there, and no log of AReaL's in {trial.logs} says it"
        raise ConfigError(
            f"what {trial.name} was started with is not known: {journal} {unsaid}",
            f"say it as it was: --command {_example(trial)}"
            + (f"; the resolved settings are in {settings}" if settings.exists() else ""),
        )
    wrong = [setting for setting in given.settings if "=" not in setting]
    if wrong:
        hint = (
            "the run goes by its names: --experiment-name, --trial-name"
            if Path(wrong[0]).is_dir()
            else "write key=value"
        )
        raise ConfigError(f"{wrong[0]!r} is no setting", hint)
    return command.changed(given.settings) if given.settings else command


def _example(trial: TrialFolder) -> str:
    seen = "" if trial.is_ours else launch_command(trial.logs)
    return shlex.quote(seen) if seen else EXAMPLES[trial.is_ours]


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(
            f"--command {command!r} can't be read: {str(error).lower()}", "close its quotes, as a shell would ask"
        ) from error


def _show(catalog: CheckpointCatalog, source: ResumeSource) -> None:
    print(f"{catalog.trial.name}: {source.summary}")
    for name, line in source.facts:
        print(f"{name:<11} {line}")
    if catalog.health.damage is not None:
        print(f"{'damage':<11} {say_damage(catalog.health.damage)}")
    if why := catalog.health.not_known:
        print(f"{'health':<11} not seen: {why}")
    if skipped := say_not_read(catalog):
        print(skipped)


def _fit(catalog: CheckpointCatalog, source: ResumeSource) -> str:
    what = "experiment and trial, batch size, group size, nodes, model"
    if source.made_with is None:
        return f"NOT compared, as its settings were not recorded: check yourself that they are the same: {what}"
    if catalog.trial.is_ours:
        return f"fit the checkpoint: {what}"
    return f"fit the checkpoint as far as the words of the command say, its files are not read: {what}"


def _refuse(source: ResumeSource, differences: Sequence[Difference]) -> int:
    print(f"settings    do NOT fit step {source.global_step}:")
    for one in differences:
        print(f"  {one}")
    print("set them back, or give the new run another trial_name; nothing was started", file=sys.stderr)
    return WRONG


def _say_lost(script: str, added: Sequence[str], *, yes: bool) -> None:
    """Raises ConfigError where nobody is asked: without these AReaL would begin anew, in the same folders."""
    what = f"{script} hands no arguments on, so {' '.join(added)} would not reach the run"
    remedy = 'write "$@" behind the command in it'
    if yes:
        raise ConfigError(what, remedy)
    print(f"warning     {what}: {remedy}")


def _agreed() -> bool:
    try:
        return input("start it? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        return False


def _run(command: Command) -> int:
    """In this process's place. Raises CheckpointError where there is no such program."""
    words = [sys.executable, *command.words[1:]] if command.words[0] in {"python", "python3"} else [*command.words]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.chdir(command.folder or ".")
        os.execvp(words[0], words)
    except OSError as error:
        raise CheckpointError(f"{command} can't be started: {error}", "start it manually") from error


if __name__ == "__main__":
    sys.exit(main())
