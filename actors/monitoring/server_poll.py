"""One question to a server's actor at a time, held there until something changes, and its last answer.

An actor that does not answer is unknown, however long it is away: unknown is never a reason to kill (P7).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from actors.serving.server_report import ServerReport, ServerWork
from launcher.base.errors import LauncherError
from launcher.base.messages import Health, Verdict

HOLD_S = 0.5
"""A question is held so long: what it says of the server's work is as old at most. Each costs two processes 2 ms."""
ANSWER_S = 3.0
"""In which a question must be answered beyond that."""
AGAIN_S = 0.25
"""Before the next question to an actor that could not be asked: Ray may be starting it."""
FRESH_S = 5.0
"""Age from which an answer shows nothing any more."""
AWAY = Verdict(health=Health.UNKNOWN, reason="its actor does not answer")

Ask = Callable[[str, ServerWork, float], Awaitable[ServerReport]]
"""Name, work, and for how long the answer may be held. Raises LauncherError."""


class ServerPoll:
    """Of the incarnation that `work` is of. `run` until cancelled. `changed` is called with each report that differs
    from the one before in more than its ages."""

    def __init__(
        self,
        name: str,
        work: ServerWork,
        ask: Ask,
        *,
        proof_s: float,
        changed: Callable[[str, ServerReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`proof_s`: the age from which what is known of its work counts no more."""
        self.ordered = work.generation
        self._name = name
        self._ask = ask
        self._proof_s = proof_s
        self._changed = changed
        self._clock = clock
        self._report: ServerReport | None = None
        self._answered_at = 0.0
        self._unanswered = 0
        self._noted: object = None
        self.take_work(work)

    def take_work(self, work: ServerWork) -> None:
        self._work = work
        self._work_at = self._clock()

    def report(self) -> ServerReport | None:
        """As of now; None where it has not had the time to answer."""
        silent_s = self._unanswered * (HOLD_S + ANSWER_S)
        if self._report is None:
            if not self._unanswered:
                return None
            # A HealthMonitor that was restarted beside an actor that hangs: that it is silent is known all the same.
            return ServerReport(ordered=self.ordered, info=None, verdict=AWAY, silent_s=silent_s)
        age_s = self._clock() - self._answered_at
        report = replace(self._report.aged(age_s), silent_s=silent_s)
        if age_s <= FRESH_S or report.end is not None:  # an end is no less true for being old
            return report
        return replace(report, verdict=AWAY)

    async def run(self) -> None:
        while True:
            try:
                report = await self._ask(self._name, self._work_now(), HOLD_S)
            except LauncherError as error:
                self._unanswered += isinstance(error.__cause__, TimeoutError)
                self._note()
                await asyncio.sleep(AGAIN_S)
            else:
                self._report = report
                self._answered_at = self._clock()
                self._unanswered = 0
                self._note()

    def _work_now(self) -> ServerWork:
        """With its age; nothing where the trainer was not heard of for long."""
        age_s = self._clock() - self._work_at
        return self._work.aged(age_s) if age_s <= self._proof_s else ServerWork(generation=self.ordered)

    def _note(self) -> None:
        report, before = self.report(), self._noted
        if report is None:
            return
        verdict = report.verdict
        health = None if verdict is None else (verdict.health, verdict.cause)
        self._noted = (report.info, health, report.end is None, report.blind)
        if self._noted != before:
            self._changed(self._name, report)
