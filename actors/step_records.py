"""The lines that a committed step leaves behind: in the ledger, in the metrics, for whoever asks the trainer."""

from __future__ import annotations

import logging
from pathlib import Path

from actors.lease import wait_for_lease
from launcher.journal import LineLog, Record, read_lines, standing_lines
from launcher.messages import StepReport
from launcher.run_paths import RunPaths

log = logging.getLogger("trainer")


class StepRecords:
    """`reports`: of this life."""

    def __init__(self, paths: RunPaths) -> None:
        self.reports: list[StepReport] = []
        self._ledger = LineLog(paths.ledger, durable=True)
        self._metrics = LineLog(paths.metrics)

    def write(self, report: StepReport) -> None:
        wait_for_lease()
        self._ledger.append(report.ledger_line())
        self._metrics.append(report.metrics_line())
        self._tell(report)

    def complete(self, report: StepReport) -> None:
        """Write what a kill kept from being written of the last step: its state was whole before its lines were."""
        if not _stands(self._metrics.path, report.metrics_line(), ("attempt", "time")):
            self._metrics.append(report.metrics_line())
        ledger_line = report.ledger_line()
        if not _stands(self._ledger.path, ledger_line, tuple(ledger_line)):
            self._ledger.append(ledger_line)
            self._tell(report)

    def _tell(self, report: StepReport) -> None:
        self.reports.append(report)
        log.info(
            "step %d: reward %.3f, policy_version %d",
            report.global_step,
            report.metrics["rollout/reward"],
            report.policy_version,
        )


def _stands(path: Path, line: Record, keys: tuple[str, ...]) -> bool:
    """Is the line that stands for this step this one? Before a restore another branch of the run wrote one too."""
    same_step = (known for known in standing_lines(read_lines(path)) if known["global_step"] == line["global_step"])
    return any(all(known.get(key) == line[key] for key in keys) for known in same_step)
