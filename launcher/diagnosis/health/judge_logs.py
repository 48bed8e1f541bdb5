"""Which connection errors in the logs still count?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.diagnosis.health.finding import CheckResult, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorsSeen:
    """Lines of one kind in one log. Times are unix seconds, None where no line had one."""

    kind: str
    log: str
    count: int
    first: float | None
    last: float | None


def judge_errors(seen: Sequence[ErrorsSeen], *, now: float, recent_s: float, is_live: bool) -> list[Finding]:
    """Old ones are a note: what was repaired is over. Those of the last moments of a live run are not."""
    if not seen:
        return [
            Finding(check="logs", subject="connections", verdict=CheckResult.OK, said="no connection error in the logs")
        ]
    found = []
    for one in seen:
        is_recent = is_live and one.last is not None and now - one.last <= recent_s
        facts = {"kind": one.kind, "log": one.log, "count": one.count, "first": one.first, "last": one.last}
        found.append(
            Finding(
                check="logs",
                subject=one.log,
                verdict=CheckResult.BAD if is_recent else CheckResult.NOTE,
                said=f"{one.count:,} × {one.kind}{_when(one, now)}",
                facts=facts,
            )
        )
    return found


def _when(one: ErrorsSeen, now: float) -> str:
    if one.last is None or one.first is None:
        return ", at times that the lines don't say"
    if one.count == 1:
        return f", {_ago(now - one.last)}"
    return f", from {_ago(now - one.first)} to {_ago(now - one.last)}"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
