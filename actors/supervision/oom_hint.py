"""What a server that hangs has said of it: memory that ran out may end one thread alone and leave the others waiting.

SGLang 0.5.17 on the CPU, seen: no room for the thread that loads weights, `MemoryError` in the log, and the scheduler
waits for that thread for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from actors.serving.server_log_tail import decisive_lines, tail
from launcher.base.messages import Cause, Health
from launcher.policy.exit_cause import ExitFinding, find_server_cause
from launcher.policy.observed import ServerFacts


class OomHint:
    """`log`: where a server's log is, by its name. Read once for each life that was condemned."""

    def __init__(self, log: Callable[[str], Path]) -> None:
        self._log = log
        self._found: dict[tuple[str, int], ExitFinding] = {}

    def explain(self, facts: ServerFacts, generation: int) -> ServerFacts:
        """The same, or out of memory in place of hung where its log says so."""
        verdict = facts.verdict
        if verdict.health is not Health.DEAD or verdict.cause is not Cause.SERVER_HANG:
            return facts
        life = (facts.name, generation)
        if life not in self._found:
            said = of_life(tail(self._log(facts.name), 0), generation)
            self._found[life] = find_server_cause(decisive_lines(said), None)
        found = self._found[life]
        if found.ran_out is None:
            return facts
        reason = f"{verdict.reason}; its log says: {found.line}"
        return replace(facts, verdict=replace(verdict, reason=reason, cause=found.cause), ran_out=found.ran_out)


def of_life(text: str, generation: int) -> str:
    """The part that one life wrote; all of it where its beginning is too long ago to be in `text`."""
    *_, part = re.split(rf"^==== generation {generation}, ", text, flags=re.MULTILINE)
    return part
