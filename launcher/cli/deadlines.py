"""Decides when a run must save and end because its machine is taken away: `run.walltime`, SIGUSR1, a preemption notice.

    deadline ─► less run.margin_s, twice the last save and copy, and the last update ─► the time to begin

What begins is what Ctrl-C begins: rollouts under way are dropped, and their prompts return to the queue; an update
under way is finished; a checkpoint is written. Its exit code says that the same command resumes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import psutil

from launcher.cli.interrupts import Interrupts
from launcher.cli.preemption_notice import NoticeWatch
from launcher.config.schema import RunConfig
from launcher.config.settings import seconds_of
from launcher.config.supervision import DeadlineConfig
from launcher.run_files.journal import Journal, Record, number_of

UPDATE = ("timeperf/train_s", "timeperf/publish_s", "timeperf/state_s")
"""What of a step is finished once it has begun."""
WRITES = {"checkpoint.committed": "save_s", "checkpoint.uploaded": "copy_s"}
"""Events that say how long one took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesTaken:
    """How long the last save, its copy to `recover.url` and the last update took; None before the first."""

    save_s: float | None = None
    copy_s: float | None = 0.0
    update_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """`at`: monotonic. `what`: to be read before "ends in 12 s"."""

    at: float
    what: str


def needed_s(took: TimesTaken, margin_s: float) -> float:
    """Twice a save and a copy: one may be under way. One that is unknown counts as long as the margin."""
    writes_s = sum(margin_s if took_s is None else 2 * took_s for took_s in (took.save_s, took.copy_s))
    return margin_s + writes_s + (took.update_s or 0.0)


def due(deadlines: Sequence[Deadline], took: TimesTaken, margin_s: float, *, now: float) -> str:
    """Why the run must begin to end now; "" while it need not."""
    first = min(deadlines, key=lambda one: one.at, default=None)
    needed = needed_s(took, margin_s)
    if first is None or now < first.at - needed:
        return ""
    return f"{first.what} ends in {max(first.at - now, 0):.0f} s, and to save and end takes up to {needed:.0f} s"


class Deadlines:
    """Those of one command. Used as a context: a thread looks for the notice meanwhile, where one is set."""

    def __init__(
        self, config: RunConfig, journal: Journal, interrupts: Interrupts, *, began: float | None = None
    ) -> None:
        """`began`: the command, monotonic; None: with this process."""
        self._settings: DeadlineConfig = config.run
        self._journal = journal
        self._interrupts = interrupts
        age_s = time.time() - psutil.Process().create_time()
        self._began = time.monotonic() - age_s if began is None else began
        where, interval_s = config.run.preemption_notice, config.run.notice_interval_s
        self._notice = None if where is None else NoticeWatch(where, journal, interval_s=interval_s)
        self._took = TimesTaken() if config.recover.url is None else TimesTaken(copy_s=None)
        self.reason = ""
        """Why the run is ending, once it is."""

    def __enter__(self) -> Self:
        if self._notice is not None:
            self._notice.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._notice is not None:
            self._notice.stop()

    def is_due(self, *, now: float | None = None) -> bool:
        """Stays true."""
        if self._notice is not None:
            self._notice.tell_if_stuck()
        if not self.reason:
            now = time.monotonic() if now is None else now
            self.reason = due(self._known(), self._took, self._settings.margin_s, now=now)
            if self.reason:
                self._journal.record("run.deadline", reason=self.reason)
        return bool(self.reason)

    def follow(self, event: Record) -> None:
        key = WRITES.get(str(event.get("event")))
        if key is not None and isinstance(seconds := event.get("seconds"), float):
            self._took = dataclasses.replace(self._took, **{key: seconds})

    def take_steps(self, steps: Sequence[Record]) -> None:
        """Lines of metrics.jsonl."""
        if steps:
            update_s = sum(number_of(steps[-1].get(name), 0.0) for name in UPDATE)
            self._took = dataclasses.replace(self._took, update_s=update_s)

    def _known(self) -> list[Deadline]:
        settings, found = self._settings, []
        if settings.walltime is not None:
            at = self._began + seconds_of(settings.walltime)
            found.append(Deadline(at=at, what=f"run.walltime={settings.walltime}"))
        if (at_notice := self._interrupts.notified_at) is not None:
            found.append(Deadline(at=at_notice + settings.notice_s, what="the time that SIGUSR1 leaves"))
        if self._notice is not None and self._notice.seen_at is not None:
            what = f"the time that the notice in {settings.preemption_notice} leaves"
            found.append(Deadline(at=self._notice.seen_at + settings.notice_s, what=what))
        return found
