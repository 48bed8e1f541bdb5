"""What one check found: of whom, how it is, and in what words."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class CheckResult(enum.StrEnum):
    """OK and NOTE are healthy, ABSENT has nothing that could be ill; what could not be seen is UNKNOWN, not healthy."""

    OK = "ok"
    NOTE = "note"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    BAD = "bad"


HEALTHY = frozenset({CheckResult.OK, CheckResult.NOTE, CheckResult.ABSENT})
ORDER = (CheckResult.BAD, CheckResult.UNKNOWN, CheckResult.NOTE, CheckResult.OK, CheckResult.ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`facts` are for machines; `said` is for people, and has the figures that matter."""

    check: str
    subject: str
    verdict: CheckResult
    said: str
    facts: Mapping[str, object] = field(default_factory=dict)


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.verdict in HEALTHY for finding in findings)


def first_line(run: str, state: str, findings: Sequence[Finding]) -> str:
    """The answer: healthy or not, and what to look at first."""
    troubles = [one for verdict in ORDER[:2] for one in findings if one.verdict is verdict]
    if not troubles:
        return f"HEALTHY      {run}: {state}"
    said = "; ".join(f"{one.subject}: {one.said}" for one in troubles[:2])
    more = f"; and {len(troubles) - 2} more" if len(troubles) > 2 else ""
    return f"NOT HEALTHY  {run}: {said}{more}"
