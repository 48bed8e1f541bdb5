"""Runs a sweep (`python -m launcher -m …`) and shows its table, and writes the same as CSV.

The exit code is 0 where a trial FINISHED: others may have run out of memory, which is what a sweep is for. Else it is
the code of the first that did not finish; 130 where the user ended it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launcher.base.durable import make_folder, replace_file
from launcher.base.errors import LauncherError, StorageError, UsageError
from launcher.base.exit_codes import EXIT_CODES
from launcher.base.file_lock import file_held
from launcher.base.messages import TerminalStatus
from launcher.config.schema import RunConfig
from launcher.config.settings import as_typed, value_of
from launcher.reporting.terminal_text import console_of_width
from launcher.resources.config_checks import check
from launcher.resources.hardware import find_hardware
from launcher.resources.missing_files import find_shape
from launcher.resources.run_plan import make_plan
from launcher.run_files.run_paths import login_name
from launcher.sweep.sweep_report import as_csv, show
from launcher.sweep.sweep_run import SweepRun, TrialCandidate
from launcher.sweep.sweep_trials import Sweep, plan_sweep
from launcher.sweep.trial_capacity import find_capacity
from launcher.sweep.trial_results import TrialResult, TrialStatus

ReadTrial = Callable[[Sequence[str]], tuple[RunConfig, Sequence[str]]]
"""Overrides → checked settings, and those that the preset marks as to be fitted. Raises LauncherError."""

FILE_WIDTH = 160
"""Of a table that goes into a file, which has no edge to keep to."""

CODES = {
    TrialStatus.FINISHED: EXIT_CODES[TerminalStatus.FINISHED],
    TrialStatus.ERRORED: EXIT_CODES[TerminalStatus.ERRORED],
    TrialStatus.REFUSED: UsageError.exit_code,
    TrialStatus.CUT_OFF: 1,
    TrialStatus.NOT_RUN: 1,
}


def run_sweep(combinations: Sequence[Sequence[str]], read: ReadTrial, command: Sequence[str]) -> int:
    """`command`: of a single run, without its overrides. Raises LauncherError where the sweep itself can't be."""
    sweep, candidates = candidates_of(combinations, read)
    configs = [candidate.config for candidate in candidates if candidate.config is not None]
    if not configs:
        for candidate in candidates:
            print(f"error: {candidate.trial}: {candidate.refusal}", file=sys.stderr)
        return CODES[TrialStatus.REFUSED]
    hardware = find_hardware()
    capacity = find_capacity(configs, [make_plan(one, hardware, find_shape(one)) for one in configs], hardware)
    first = configs[0]
    folder = Path(first.cluster.fileroot) / "sweeps" / login_name() / first.experiment_name / sweep.name
    with _only_sweep(folder):
        _say(f"sweep of {len(candidates)} trials, {len(capacity.slots)} at a time ({capacity.reason}), in {folder}")
        if sweep.is_over_memory:
            _say("memory settings are swept: a trial that runs out of memory ends; nothing gives way, nothing is kept")
        run = SweepRun(candidates, command, folder, capacity, _say, retry=configs[0].sweep.retry)
        results = run.run()
        show(results, console_of_width(FILE_WIDTH))
        _keep(results, folder)
    return EXIT_CODES[TerminalStatus.ABORTED] if run.was_interrupted else exit_code(results)


def candidates_of(combinations: Sequence[Sequence[str]], read: ReadTrial) -> tuple[Sweep, list[TrialCandidate]]:
    """Each trial with its settings, or with what is wrong with them: found before anything is started."""
    sweep = plan_sweep(combinations)
    found = []
    for planned in sweep.trials:
        trial = planned
        try:
            config, marked = read(trial.overrides)
            if sweep.is_over_memory and not config.hardware.auto:
                # Fitted to each trial's own value, they would differ too: the table would compare more than was swept.
                trial, marked = trial.with_typed({key: as_typed(value_of(config, key)) for key in marked}), ()
                check(config)
        except LauncherError as error:
            found.append(TrialCandidate(trial=trial, config=None, refusal=error))
            continue
        found.append(TrialCandidate(trial=trial, config=config, marked=tuple(marked)))
    return sweep, found


def exit_code(results: Sequence[TrialResult]) -> int:
    """Of a sweep that was not interrupted."""
    codes = [CODES[result.status] for result in results]
    return 0 if 0 in codes else codes[0]


def _keep(results: Sequence[TrialResult], folder: Path) -> None:
    """The table as a file. If it can't be written, that is reported: the trials have their results all the same."""
    try:
        replace_file(folder / "sweep.csv", as_csv(results))
    except OSError as error:
        _say(f"sweep.csv was not written: {error}")
    _say(f"table and what each trial printed: {folder}")


@contextmanager
def _only_sweep(folder: Path) -> Iterator[None]:
    """Raises StorageError where the same sweep is running already, or its folder can't be written."""
    with ExitStack() as stack:
        try:
            make_folder(folder)
            stack.enter_context(file_held(folder / ".lock"))
        except BlockingIOError as error:
            raise StorageError(f"this sweep is running already: {folder}", "wait for it, or end it") from error
        except OSError as error:
            raise StorageError(
                f"{folder} can't be written: {error.strerror}", "set cluster.fileroot to another folder"
            ) from error
        yield


def _say(line: str) -> None:
    print(line, flush=True)
