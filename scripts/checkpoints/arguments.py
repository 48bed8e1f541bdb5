"""The flags that name a trial, the same in every tool."""

from __future__ import annotations

import argparse
import difflib
import math
import textwrap
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from launcher.base.errors import HINT
from launcher.checkpoints.trial_folders import TrialFolder, find_trial
from launcher.run_files.run_paths import login_name
from scripts.run_processes import only_live_run

NOTHING_FITS = 1
DEFAULT_FILEROOT = Path("outputs/grpo")


class Parser(argparse.ArgumentParser):
    """With the exit codes below its help; wrong arguments end in one message, as every error, and exit code 2."""

    def __init__(self, name: str, what: str, exit_codes: str = "", *, examples: str = "") -> None:
        super().__init__(
            prog=f"python -m scripts.{name}",
            description=what,
            epilog=f"Exit codes: {exit_codes}{examples}" if exit_codes else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter if examples else argparse.HelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """What is wrong; then the flags that come near to one that is unknown, or what the tool takes."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        typed = message.split() if message.startswith("unrecognized") else []
        near = [flag for word in typed for flag in difflib.get_close_matches(word.partition("=")[0], flags, n=1)]
        hint = f"did you mean {', '.join(near)}?" if near else textwrap.indent(self.format_usage().strip(), "    ")
        self.exit(2, f"error: {message}{HINT}{hint.lstrip()}\n")


def add_trial(parser: argparse.ArgumentParser) -> None:
    add_names(
        parser.add_argument_group("which trial (default: the only one, or the only live one)"),
        trial_help="trial_name of the run",
    )


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


def server_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server: write http://HOST:PORT")
    return text.rstrip("/")


def trial_of(given: argparse.Namespace) -> TrialFolder:
    """By as many names as are needed; where none is given, the only live run's, as all tools choose. Raises UsageError
    naming what is wrong, and what there is instead."""
    names = (given.experiment_name, given.trial_name)
    if not any(names):
        live = only_live_run(given.fileroot.expanduser().absolute(), given.user)
        if live is not None:
            names = (live.experiment_name, live.trial_name)
    return find_trial(given.fileroot, given.user, *names)
