"""Is this run healthy? Servers, logs, GPUs, memory, disk, steps, checkpoints: `python -m scripts.check_health --help`.

For a live run and for a dead one, of this launcher and of AReaL's own. It changes nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

from rich.table import Table
from rich.text import Text

from launcher.base.errors import UsageError
from launcher.base.findings import Finding, Severity
from launcher.reporting.terminal_text import as_far_as_it_is_read, console_of_width
from launcher.run_files.run_paths import RunPaths
from scripts.checkpoints.arguments import Parser, server_url
from scripts.ending import ended, print_json
from scripts.health.disk_check import check_checkpoints, check_disk
from scripts.health.findings import first_line, is_healthy, run_checks
from scripts.health.log_check import check_logs
from scripts.health.machine_check import check_gpus, check_memory
from scripts.health.run_check import Subject, check_run, find_subject
from scripts.health.server_check import check_servers
from scripts.run_choice import add_run_arguments, chosen_run

WIDTH_OF_A_FILE = 200
IS_HEALTHY, NOT_HEALTHY = 0, 1
CHECKS = {
    "run": check_run,
    "servers": check_servers,
    "logs": check_logs,
    "gpu": check_gpus,
    "memory": check_memory,
    "disk": check_disk,
    "checkpoints": check_checkpoints,
}
COLOURS = {
    Severity.OK: "green",
    Severity.NOTE: "cyan",
    Severity.ABSENT: "dim",
    Severity.UNKNOWN: "bold yellow",
    Severity.BAD: "bold red",
}


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _check(parser().parse_args(arguments)))


def _check(given: argparse.Namespace) -> int:
    paths = chosen_run(given)
    if not (0 < given.timeout < math.inf and 0 <= given.recent < math.inf):
        raise UsageError(
            f"--timeout {given.timeout:g} or --recent {given.recent:g} is no number of seconds",
            "e.g. --timeout 10 --recent 60",
        )
    subject = find_subject(paths, timeout_s=given.timeout, recent_s=given.recent, extra_servers=tuple(given.server))
    findings = run_checks({name: partial(check, subject) for name, check in CHECKS.items()}, timeout_s=given.timeout)
    with as_far_as_it_is_read():
        if given.json:
            print_json(as_json(paths, subject, findings), indent=1)
        else:
            show(paths, findings)
    return IS_HEALTHY if is_healthy(_all(findings)) else NOT_HEALTHY


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "check_health",
        "Is this run healthy? Checks a live run or the files of a dead one; changes nothing.",
        "0 healthy; 1 not healthy, or something could not be seen; 2 the command is wrong",
    )
    add_run_arguments(made)
    made.add_argument(
        "--server",
        type=server_url,
        action="append",
        default=[],
        metavar="URL",
        help="check this server too; may be repeated",
    )
    made.add_argument("--timeout", type=float, default=10.0, metavar="S", help="deadline of each check (default 10)")
    made.add_argument(
        "--recent",
        type=float,
        default=60.0,
        metavar="S",
        help="errors in the logs count if they are younger than this (default 60)",
    )
    made.add_argument("--json", action="store_true", help="print all findings as JSON")
    return made


def as_json(paths: RunPaths, subject: Subject, findings: Mapping[str, Sequence[Finding]]) -> dict[str, object]:
    return {
        "format": "grpo-health/1",
        "healthy": is_healthy(_all(findings)),
        "run": {"experiment_name": paths.experiment_name, "trial_name": paths.trial_name, "logs": str(paths.logs)},
        "is_live": subject.is_live,
        "checked_at": time.time(),
        "findings": [
            {"check": check, "subject": one.subject, "verdict": one.level, "said": one.text, "facts": one.facts}
            for check, found in findings.items()
            for one in found
        ],
    }


def _all(findings: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    return [one for found in findings.values() for one in found]


def show(paths: RunPaths, findings: Mapping[str, Sequence[Finding]]) -> None:
    console = console_of_width(WIDTH_OF_A_FILE)
    run = f"{paths.experiment_name} / {paths.trial_name}"
    state = next((one.text for one in findings["run"] if one.subject == "state"), "")
    first = first_line(run, state, _all(findings))
    console.print(Text(first, style="bold green" if is_healthy(_all(findings)) else "bold red"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for heading in ("check", "of", "is", "what was seen"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("check", "is"))
    for check, found in findings.items():
        for one in found:
            table.add_row(check, Text(one.subject), Text(one.level, style=COLOURS[one.level]), Text(one.text))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
