"""What a check found, and how checks run at the same time, each with its own deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.base.errors import LauncherError
from launcher.base.findings import Severity

OK, NOTE, ABSENT = Severity.OK, Severity.NOTE, Severity.ABSENT
UNKNOWN, BAD = Severity.UNKNOWN, Severity.BAD


@dataclass(frozen=True, slots=True)
class Checked:
    """`facts` are for machines; `said` is the text for people, with the figures that matter."""

    check: str
    subject: str
    verdict: Severity
    said: str
    facts: Mapping[str, object] = field(default_factory=dict)


Check = Callable[[], list[Checked]]


def is_healthy(findings: Iterable[Checked]) -> bool:
    """What could not be seen is not."""
    return not any(finding.verdict.stops for finding in findings)


def first_line(run: str, state: str, findings: Sequence[Checked]) -> str:
    """The answer: healthy or not, and what to look at first."""
    troubles = [one for verdict in (BAD, UNKNOWN) for one in findings if one.verdict is verdict]
    if not troubles:
        return f"HEALTHY      {run}: {state}"
    first = "; ".join(f"{one.subject}: {one.said}" for one in troubles[:2])
    more = f"; and {len(troubles) - 2} more" if len(troubles) > 2 else ""
    return f"NOT HEALTHY  {run}: {first}{more}"


def run_checks(checks: Mapping[str, Check], *, timeout_s: float) -> list[Checked]:
    """The findings in the order of `checks`. A check that is late or fails is UNKNOWN and delays no other; a thread
    that hangs at a disk ends with the process."""
    answers: queue.SimpleQueue[tuple[str, list[Checked]]] = queue.SimpleQueue()

    def answer(name: str, check: Check) -> None:
        answers.put((name, _guarded(name, check)))

    for name, check in checks.items():
        threading.Thread(target=answer, args=(name, check), name=name, daemon=True).start()
    found: dict[str, list[Checked]] = {}
    give_up_at = time.monotonic() + timeout_s
    while len(found) < len(checks):
        try:
            name, findings = answers.get(timeout=max(give_up_at - time.monotonic(), 0.0))
        except queue.Empty:
            break
        found[name] = findings
    late = f"no answer within {timeout_s:g} s"
    return [one for name in checks for one in found.get(name, [Checked(name, name, UNKNOWN, late)])]


def _guarded(name: str, check: Check) -> list[Checked]:
    try:
        return check()
    except LauncherError as error:
        return [Checked(name, name, UNKNOWN, error.message)]
    except Exception as error:  # noqa: BLE001 - a check that fails must not keep the others from being shown
        return [Checked(name, name, UNKNOWN, f"the check itself failed: {error!r}")]
