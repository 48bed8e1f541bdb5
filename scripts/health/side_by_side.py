"""Checks at the same time, each with its own deadline: one that hangs costs itself, and says so."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from launcher.base.errors import LauncherError
from launcher.diagnosis.health.finding import CheckResult, Finding

Check = Callable[[], list[Finding]]


def run_checks(checks: Mapping[str, Check], *, timeout_s: float) -> list[Finding]:
    """In the order given. What is late or failed is UNKNOWN; a thread that hangs at a disk ends with the process."""
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
    return [finding for name in checks for finding in found.get(name, [_unknown(name, late)])]


def _guarded(name: str, check: Check) -> list[Finding]:
    try:
        return check()
    except LauncherError as error:
        return [_unknown(name, error.message)]
    except Exception as error:  # noqa: BLE001 - what a check can't see must not keep the others from being told
        return [_unknown(name, f"the check itself failed: {error!r}")]


def _unknown(name: str, said: str) -> Finding:
    return Finding(check=name, subject=name, verdict=CheckResult.UNKNOWN, said=said)
