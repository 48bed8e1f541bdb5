"""Injects faults into a live run from outside: `python -m scripts.inject_fault --help`.

See docs/supervision.md. Exit codes: 0 every fault fired; 1 one of them did not (the run had ended, it didn't come in
time, it would have ended a last copy); 2 the command is wrong, or this run can't have such a fault: nothing was done.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.run_files.run_paths import RunPaths, login_name
from scripts.checkpoints.arguments import DEFAULT_FILEROOT, Parser, seconds
from scripts.ending import INTERRUPTED, WRONG, ended
from scripts.faults.campaign import Campaign, Rules
from scripts.faults.fault_paths import FaultPaths
from scripts.faults.kinds import describe
from scripts.faults.run_progress import LiveProgress
from scripts.faults.schedule import FaultChoice, ScheduledFault, in_order, parse_fault, storm
from scripts.run_processes import RunProcesses, find_holder, find_run, live_runs, title

FIRED, NOT_ALL_FIRED = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _run(_parser().parse_args(arguments)))


def _run(given: argparse.Namespace) -> int:
    if given.list:
        print(describe())
        return FIRED
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a fault has changed is changed back
    try:
        return _inject(given)
    except KeyboardInterrupt:
        print("interrupted: what was changed for a time is changed back", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser("inject_fault", "Inject faults into a live run, from outside.")
    parser.add_argument("faults", nargs="*", metavar="KIND[:option=value,…][@STEP|@+SECONDS]")
    parser.add_argument("--list", action="store_true", help="list all kinds of faults with their options")
    parser.add_argument("--fileroot", type=Path, default=DEFAULT_FILEROOT, help="cluster.fileroot of the run")
    parser.add_argument("--run", metavar="EXPERIMENT/TRIAL", help="needed if several runs are live")
    parser.add_argument("--user", default=login_name(), help="who started the run")
    parser.add_argument("--storm", metavar="'KIND[xN] …'", help="inject faults at steps drawn by --seed from --steps")
    parser.add_argument("--steps", metavar="FIRST:LAST", help="range of steps of a storm")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices")
    parser.add_argument(
        "--within", type=seconds, default=300.0, metavar="S", help="longest wait of a due fault for its chance"
    )
    parser.add_argument("--keep-one", action="store_true", help="don't end the last server that generates")
    parser.add_argument("--even-the-last", action="store_true", help="also end or damage the last copy")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done, and to which process; do nothing"
    )
    return parser


def _inject(given: argparse.Namespace) -> int:
    faults = _faults(given)
    paths = _paths(given)
    found = find_run(paths)
    for fault in faults:
        fault.kind.check(paths, found)
    rules = Rules(seed=given.seed, within_s=given.within, keep_one=given.keep_one, even_the_last=given.even_the_last)
    campaign = Campaign(paths, rules, say=lambda line: print(line, flush=True))
    if given.dry_run:
        _show(paths, found, faults, campaign)
        return FIRED
    ends = campaign.run(faults)
    print(f"{ends[FaultChoice.FIRE]} of {len(faults)} fired; see {FaultPaths(paths).record}")
    if ends[FaultChoice.FIRE] == len(faults):
        return FIRED
    return WRONG if ends[FaultChoice.REFUSE] == len(faults) else NOT_ALL_FIRED


def _faults(given: argparse.Namespace) -> tuple[ScheduledFault, ...]:
    faults = tuple(parse_fault(text) for text in given.faults)
    if given.storm:
        first, last = _steps(given.steps)
        faults += storm(given.storm, first_step=first, last_step=last, seed=given.seed)
    if not faults:
        raise UsageError("no fault was named", "name one, e.g. C1, or see --list")
    return faults


def _steps(text: str | None) -> tuple[int, int]:
    first, _, last = (text or "").partition(":")
    if not first.isdigit() or not last.isdigit():
        raise UsageError(f"--steps {text or '(not given)'} is no range of steps", "a storm needs e.g. --steps 20:180")
    return int(first), int(last)


def _paths(given: argparse.Namespace) -> RunPaths:
    """The run that is named, or the only live one. Raises UsageError."""
    if given.run:
        experiment, _, trial = given.run.rstrip("/").partition("/")
        if not experiment or not trial:
            raise UsageError(f"--run {given.run} names no run", "write --run EXPERIMENT/TRIAL")
        paths = RunPaths(fileroot=given.fileroot, user=given.user, experiment_name=experiment, trial_name=trial)
        find_holder(paths)
        return paths
    live = live_runs(given.fileroot)
    if len(live) != 1:
        names = ", ".join(f"{paths.experiment_name}/{paths.trial_name}" for paths in live) or "none"
        raise UsageError(f"live runs below {given.fileroot}: {names}", "name one with --run, or another --fileroot")
    return live[0]


def _show(paths: RunPaths, found: RunProcesses, faults: Sequence[ScheduledFault], campaign: Campaign) -> None:
    progress = LiveProgress(paths)
    progress.refresh()
    print(f"run      {paths.experiment_name}/{paths.trial_name}, last committed step {progress.step}")
    print(f"driver   pid {found.driver.pid}")
    for server in found.servers:
        ready = "READY" if progress.is_ready(server.name, server.http.pid) else "not READY"
        parts = ", ".join(f"{process.pid} {title(process)[:24]}" for process in server.tree)
        print(f"{server.name} {ready} at {server.url}: {parts}")
    print(f"trainer  {'none' if found.trainer is None else f'pid {found.trainer.pid}'}")
    for who, process in found.supervisors.items():
        print(f"{who} pid {process.pid}")
    for fault in in_order(faults):
        against = campaign.last_copy(fault, found)
        print(f"{fault}: {fault.kind.what}" + (f" — now it would be refused: {against}" if against else ""))
    print(f"nothing was done; it would be written to {FaultPaths(paths).record}")


if __name__ == "__main__":
    sys.exit(main())
