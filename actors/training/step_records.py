"""Writes each committed step to the ledger and the metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from actors.cluster.fencing import wait_for_lease
from launcher.base.disk_faults import OF_A_FILE, Refusal
from launcher.base.durable import refusal_of
from launcher.base.messages import StepReport
from launcher.run_files.journal import LineLog, current_line, read_lines
from launcher.run_files.run_paths import RunPaths

CUT_SHARE = 0.95
"""Of the first step's completions. Below, some end by themselves, so that the model has an end that servers know."""

OF_A_STEP = ("global_step", "attempt", "time")
"""What no two steps of a run share, whatever was undone between them."""

log = logging.getLogger("trainer")


class StepRecords:
    def __init__(self, paths: RunPaths) -> None:
        self._ledger = LineLog(paths.ledger, durable=True)
        self._metrics = LineLog(paths.metrics)

    def write(self, report: StepReport) -> Refusal | None:
        """What refused a line, if something did; it waits in memory then."""
        wait_for_lease()
        self._ledger.append(report.ledger_line())
        self._metrics.append(report.metrics_line())
        self._tell(report)
        return self.refusal()

    def refusal(self) -> Refusal | None:
        """Writes the lines that wait; what refuses one, None where none waits any more."""
        for lines in (self._ledger, self._metrics):
            if not lines.flush() and (fault := lines.fault) is not None:
                file = str(lines.path) if fault in OF_A_FILE else ""
                return refusal_of(lines.path.parent, fault, file=file)
        return None

    def complete(self, report: StepReport) -> None:
        """Write the lines of the last step that are missing because of a kill, or of a disk that refused them: its
        state came first. Not those of a step that was undone since, and to which a person has gone back."""
        line = report.metrics_line()
        if not _stands(self._metrics.path, line, OF_A_STEP):
            if any(_is_same(known, line, OF_A_STEP) for known in read_lines(self._metrics.path)):
                return
            self._metrics.append(line)
        ledger_line = report.ledger_line()
        if not _stands(self._ledger.path, ledger_line, tuple(ledger_line)):
            self._ledger.append(ledger_line)
            self._tell(report)

    def _tell(self, report: StepReport) -> None:
        log.info(
            "step %d: reward %.3f, policy_version %d (Train step %d)",  # as AReaL counts: people look for it
            report.global_step,
            report.metrics["rollout/reward"],
            report.policy_version,
            report.global_step + 1,
        )


def _stands(path: Path, line: Mapping[str, object], keys: tuple[str, ...]) -> bool:
    """Whether this is the valid line of its step: before a restore, another branch of the run wrote one too."""
    known = current_line(path, cast(int, line["global_step"]))
    return known is not None and _is_same(known, line, keys)


def _is_same(known: Mapping[str, object], line: Mapping[str, object], keys: tuple[str, ...]) -> bool:
    return all(known.get(key) == line[key] for key in keys)


def cut_reason(metrics: Mapping[str, float], limit: int) -> str:
    """Why the first completions look as if nothing ended them; "" where most ended by themselves."""
    share = metrics.get("grpo_actor/no_eos_ratios/avg", 0.0)
    if share < CUT_SHARE:
        return ""
    return (
        f"{share:.0%} of the first step's completions were cut at gconfig.max_new_tokens={limit}: it is too short for "
        "an answer, or the model writes an end token that servers don't stop at (dry_run=true compares the chat "
        "template with the model's end tokens)"
    )
