"""The flags that name a trial, the same in every tool."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from launcher.checkpoints.trial_folders import TrialFolder, find_trial
from launcher.run_files.run_paths import login_name

NOTHING_FITS = 1
DEFAULT_FILEROOT = Path("outputs/grpo")


class Parser(argparse.ArgumentParser):
    """With the exit codes below its help; a wrong flag ends in one message, exit code 2."""

    def __init__(self, name: str, what: str, exit_codes: str = "", *, examples: str = "") -> None:
        super().__init__(
            prog=f"python -m scripts.{name}",
            description=what,
            epilog=f"Exit codes: {exit_codes}{examples}" if exit_codes else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter,
        )


def add_trial(parser: argparse.ArgumentParser) -> None:
    add_names(parser.add_argument_group("which trial (default: the only one)"), trial_help="trial_name of the run")


def add_names(parser: argparse._ActionsContainer, *, trial_help: str) -> None:
    parser.add_argument("--experiment-name", type=typed_name, metavar="NAME", help="experiment_name of the run")
    parser.add_argument("--trial-name", type=typed_name, metavar="NAME", help=trial_help)
    parser.add_argument(
        "--fileroot",
        type=Path,
        default=DEFAULT_FILEROOT,
        metavar="FOLDER",
        help="cluster.fileroot of the run, with checkpoints/ and logs/ in it (default: %(default)s)",
    )
    parser.add_argument(
        "--user", default=login_name(), metavar="NAME", help="the user who ran it (default: %(default)s)"
    )


def typed_name(text: str) -> str:
    """A name as a shell completes it: `night/` is `night`."""
    return text.rstrip("/") or text


def step(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no step: an integer, from 0")
    return int(text)


def seconds(text: str) -> float:
    """Finite: a wait that never ends is none that anybody means."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, from 0")
    return value


def trial_of(given: argparse.Namespace) -> TrialFolder:
    """Raises UsageError naming what is wrong, and what there is instead."""
    return find_trial(given.fileroot, given.user, given.experiment_name, given.trial_name)
