"""Checks a run's ledger against its metrics, checkpoint and data set: `python -m scripts.check_ledger --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from actors.data.run_order import read_prompt_order
from launcher.base.errors import UsageError
from launcher.reporting.run_facts import RunFacts, read_facts
from launcher.run_files.run_paths import RunPaths
from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended
from scripts.run_choice import add_run_arguments, chosen_run
from scripts.run_processes import is_live

FOUND, NOT_KNOWN = 1, 3


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _check(parser().parse_args(arguments)))


def parser() -> argparse.ArgumentParser:
    what = "Check that a run's ledger has each step and each prompt, once in its epoch, on its own weights."
    codes = (
        "0 nothing is lost, doubled or stale; 1 something is; 2 the command is wrong; 3 nothing was found, but part of "
        "it is not known"
    )
    made = Parser("check_ledger", what, codes)
    add_run_arguments(made)
    return made


def _check(given: argparse.Namespace) -> int:
    paths = chosen_run(given)
    found = audited_facts(paths).audit
    if found is None and paths.ledger.exists():
        raise UsageError(
            f"{paths.ledger} can't be checked: {paths.events} has no trainer.started, and the data set can't be read",
            "both say how many prompts an epoch has: bring back one of them",
        )
    if found is None:
        raise UsageError(f"{paths.logs} has no ledger to check", "give a run whose trainer has started")
    print(found.counts)
    print(*(found.doubts or ("no problem was found",)), sep="\n")
    if found.problems:
        return FOUND
    return NOT_KNOWN if found.not_known else DONE


def audited_facts(paths: RunPaths) -> RunFacts:
    """The facts of a run, its ledger compared with its data set too. Raises JournalError."""
    return read_facts(paths, order=read_prompt_order(paths), is_live=is_live(paths))


if __name__ == "__main__":
    sys.exit(main())
