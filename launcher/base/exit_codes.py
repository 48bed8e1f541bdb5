"""The exit code of a run for each terminal status. A wrong command or configuration ends with 2 (errors.UsageError)."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.base.messages import TerminalStatus

EXIT_CODES: Mapping[TerminalStatus, int] = {
    TerminalStatus.FINISHED: 0,
    TerminalStatus.ERRORED: 3,
    TerminalStatus.ABORTED: 130,
}
RESUMES = 75
"""Of a run that was ABORTED before a deadline (EX_TEMPFAIL of sysexits.h): saved, and the same command resumes it."""
AGAIN = 76
"""Of a driver, to its keeper alone: begin another one, if the budgets allow it (again.json says why). No command ends
with it."""
