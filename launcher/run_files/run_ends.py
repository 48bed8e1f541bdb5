"""How an attempt begins and ends in a run's events; which of them was the last, launcher/run_log says."""

from __future__ import annotations

from launcher.base.messages import TerminalStatus

STARTED = "run.started"
ENDS = {f"run.{status.lower()}": status for status in TerminalStatus}
FINISHED = f"run.{TerminalStatus.FINISHED.lower()}"
GONE = (
    "its driver is gone and recorded no final status; python -m scripts.resume_training shows the command that "
    "resumes it here"
)
"""Of a run that was copied or moved the original's own command would continue the original."""
