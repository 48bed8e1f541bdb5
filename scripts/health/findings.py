"""How checks run at the same time, each with its own deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from launcher.base.errors import LauncherError
from launcher.base.findings import Finding, Severity

OK, NOTE, ABSENT = Severity.OK, Severity.NOTE, Severity.ABSENT
UNKNOWN, BAD = Severity.UNKNOWN, Severity.BAD


Check = Callable[[], list[Finding]]


def is_healthy(findings: Iterable[Finding]) -> bool:
    """What could not be seen is not."""
    return all(finding.level in (OK, NOTE, ABSENT) for finding in findings)


def first_line(run: str, state: str, findings: Sequence[Finding]) -> str:
    """The answer: healthy or not, and what to look at first."""
    troubles = [one for level in (BAD, UNKNOWN) for one in findings if one.level is level]
    if not troubles:
        return f"HEALTHY      {run}: {state}"
    first = "; ".join(f"{one.subject}: {one.text}" for one in troubles[:2])
    more = f"; and {len(troubles) - 2} more" if len(troubles) > 2 else ""
    return f"NOT HEALTHY  {run}: {first}{more}"


def run_checks(checks: Mapping[str, Check], *, timeout_s: float) -> dict[str, list[Finding]]:
    """What each found, in the order of `checks`. A check that is late or fails is UNKNOWN and delays no other; a
    thread that hangs at a disk ends with the process."""
    answers: queue.SimpleQueue[tuple[str, list[Finding]]] = queue.SimpleQueue()

    def answer(name: str, check: Check) -> None:
        answers.put((name, _guarded(name, check)))

    for name, check in checks.items():
        threading.Thread(target=answer, args=(name, check), name=name, daemon=True).start()
    found: dict[str, list[Finding]] = {}
    give_up_at = time.monotonic() + timeout_s
    while len(found) < len(checks):
        try:
            name, findings = answers.get(timeout=max(give_up_at - time.monotonic(), 0.0))
        except queue.Empty:
            break
        found[name] = findings
    late = f"no answer within {timeout_s:g} s"
    return {name: found.get(name, [Finding(name, late, UNKNOWN)]) for name in checks}


def _guarded(name: str, check: Check) -> list[Finding]:
    try:
        return check()
    except LauncherError as error:
        return [Finding(name, error.message, UNKNOWN)]
    except Exception as error:  # noqa: BLE001 - a check that fails must not keep the others from being shown
        return [Finding(name, f"the check itself failed: {error!r}", UNKNOWN)]
