"""Makes a run's report.html again from its files, also of a run that died: `python -m scripts.report --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from actors.data.run_order import read_prompt_order
from launcher.base.errors import UsageError
from launcher.html_report.report_writer import write_report
from launcher.reporting.run_facts import RunFacts
from launcher.run_files.run_paths import RunPaths
from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended, print_json
from scripts.run_choice import add_run_arguments, chosen_run
from scripts.run_processes import is_live


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _report(parser().parse_args(arguments)))


def _report(given: argparse.Namespace) -> int:
    paths = chosen_run(given)
    if not (paths.events.exists() or paths.metrics.exists()):
        raise UsageError(f"{paths.logs} has neither events.jsonl nor metrics.jsonl", "is it a run's folder of logs?")
    facts = write_report(paths, is_live=is_live(paths), order=read_prompt_order(paths))
    said = summary_of(facts, paths)
    if given.json:
        print_json(said, indent=1)
    else:
        print(said["report"])
        if facts.not_read:
            print(f"not read: {'; '.join(facts.not_read)}")
    return DONE


def parser() -> argparse.ArgumentParser:
    what = "Make a run's report.html again from its files, of a live run or of one that died."
    made = Parser("report", what, "0 written; 2 the command is wrong, or the report can't be written")
    add_run_arguments(made)
    made.add_argument(
        "--json", action="store_true", help="print the main figures as JSON instead of the file's path alone"
    )
    return made


def summary_of(facts: RunFacts, paths: RunPaths) -> dict[str, object]:
    losses = facts.losses
    return {
        "report": str(paths.report),
        "word": facts.word,
        "attempts": len(facts.attempts),
        "steps": len(facts.steps),
        "steps_taken_back": sum(map(len, facts.taken_back)),
        "incidents": len(facts.incidents),
        "mended": sum(one.is_mended is True for one in facts.incidents),
        "ettr": losses.ettr,
        "ettr_strict": losses.strict,
        "ettr_semantic": losses.semantic,
        "lost_to_faults_s": losses.faults_s,
        "price_per_hour": facts.price_per_hour,
        "faults_cost": None if facts.cost is None else facts.cost[0],
        "not_read": list(facts.not_read),
        "ledger": None if facts.audit is None else facts.audit.counts,
        "violations": None if facts.audit is None else list(facts.audit.problems),
        "violations_not_known": None if facts.audit is None else list(facts.audit.not_known),
    }


if __name__ == "__main__":
    sys.exit(main())
