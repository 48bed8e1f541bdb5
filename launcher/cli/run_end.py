"""Ends a run whose driver can't: no other may follow it, or the one that was to follow is refused (P9).

`python -m launcher.cli.run_end END TASK` is the keeper's short-lived child (launcher/cli/keeper.py).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.base.errors import JournalError, LauncherError, RunError, StorageError
from launcher.base.exit_codes import EXIT_CODES, RESUMES
from launcher.base.messages import RunOutcome, TerminalStatus
from launcher.checkpoints.in_memory_checkpoints import InMemoryCheckpoints
from launcher.checkpoints.uploads import finish_uploads, remote_of
from launcher.cli.attempt_incidents import end_incidents, last_committed
from launcher.cli.keeper import DriverTask
from launcher.cli.unattended import typed_command
from launcher.config.schema import RunConfig
from launcher.html_report.report_writer import write_report
from launcher.reporting.closing_summary import write_summary
from launcher.run_files.journal import Journal, Record
from launcher.run_files.run_ends import ENDS
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_config
from launcher.run_log.line_values import as_integer
from launcher.run_log.run_log import last_end, read_run_log

BEFORE_IT_BEGAN = "ended by the user, before another attempt was begun"


def own_end(paths: RunPaths, first_attempt: int) -> Record | None:
    """The end that this command's driver has recorded, before it was killed while it closed; None: it had not."""
    end = last_end(paths)
    attempt = None if end is None else as_integer(end.get("attempt"))
    return end if attempt is not None and attempt >= first_attempt else None


def close_as_recorded(paths: RunPaths, end: Record) -> int:
    """What a driver does once its run's end is recorded; the exit code that it would have had."""
    status = ENDS[str(end["event"])]
    step, code = as_integer(end.get("global_step")), as_integer(end.get("exit_code"))
    code, reason = EXIT_CODES[status] if code is None else code, str(end.get("reason"))
    next_ = "" if status is TerminalStatus.FINISHED else typed_command(None)
    outcome = RunOutcome(status=status, reason=reason, last_step=step, exit_code=code, next_command=next_)
    journal = Journal(paths.events, as_integer(end.get("attempt")) or 0, time.time)
    with contextlib.suppress(LauncherError):  # the run has ended; what can't be read or copied is not its status
        if problem := finish(read_config(paths.settings), paths, journal, outcome):
            print(problem)
    print(write_summary(paths, outcome), flush=True)
    return code


def finish(config: RunConfig, paths: RunPaths, journal: Journal, outcome: RunOutcome) -> str:
    """Copy what is still to be copied, and free the memory of a run that is over; returns what could not be copied."""
    problem = "" if (remote := remote_of(config)) is None else finish_uploads(config, paths, remote, journal)
    if outcome.status is TerminalStatus.FINISHED:
        with contextlib.suppress(OSError):  # the run is over, and says so
            InMemoryCheckpoints(paths).remove()  # its trainer may have been killed just before it would have
    return problem or ""


@contextlib.contextmanager
def ends_the_run(paths: RunPaths) -> Iterator[None]:
    """An attempt in place of another one can't begin: its run did, and ends with a status."""
    try:
        yield
    except KeyboardInterrupt:
        record_end(paths, TerminalStatus.ABORTED, BEFORE_IT_BEGAN)
        raise
    except LauncherError as error:
        why_open = f"no further attempt can begin: {error.message}"
        record_end(paths, TerminalStatus.ERRORED, str(error), why_open=why_open)
        what = f"{TerminalStatus.ERRORED}, as no further attempt can begin: {error.message}"
        raise RunError(what, f"{error.hint}; then the same command resumes") from error


def record_end(
    paths: RunPaths, status: TerminalStatus, reason: str, *, why_open: str = "", code: int | None = None
) -> Record:
    """Returns its event. `why_open`: why incidents that are open stay unrepaired; by default for the same reason."""
    journal = Journal(paths.events, read_run_log(paths, with_steps=False).newest_attempt, time.time)
    with contextlib.suppress(JournalError, StorageError):  # the disk may be why
        end_incidents(journal, paths, why_open or reason)
    code = EXIT_CODES[status] if code is None else code
    recorded = journal.record(f"run.{status.lower()}", reason=reason, global_step=last_committed(paths), exit_code=code)
    with contextlib.suppress(JournalError):
        write_report(paths, is_live=False)
    return recorded


def end(code: int, reason: str, task: DriverTask) -> int:
    """End the run for the keeper, in a word where nothing of it had begun; returns the exit code."""
    paths = RunPaths.of_logs(Path(task.logs))
    assert paths is not None, "the keeper has it from the run's own paths"
    if (ended := own_end(paths, task.first_attempt)) is not None:
        return close_as_recorded(paths, ended)
    statuses = {known: status for status, known in EXIT_CODES.items()} | {RESUMES: TerminalStatus.ABORTED}
    status = statuses[code]
    if read_run_log(paths, with_steps=False).newest_attempt < task.first_attempt:
        print(f"{status}: {reason}\n  → the same command resumes", file=sys.stderr)
        return code
    return close_as_recorded(paths, record_end(paths, status, reason, code=code))


def main() -> int:
    facts, task = json.loads(sys.argv[1]), DriverTask.read(sys.argv[2])
    sys.argv[1:] = task.words
    return end(facts["code"], facts["reason"], task)


if __name__ == "__main__":
    sys.exit(main())
