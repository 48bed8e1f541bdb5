"""One run as the page shows it: its files, read as they grow, and whether anybody still writes them.

Nothing is asked of the run. Facts are worked out anew when lines are new, and at most PAUSE_FACTOR times the time that
took apart, so that a page that is open costs a few percent of one core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

from launcher.base.errors import StorageError
from launcher.html_report.page_facts import FORMAT, shown, state_of, story_of
from launcher.reporting.current_status import CurrentStatus, read_now
from launcher.reporting.figures import Window
from launcher.reporting.run_facts import RunFacts, facts_of_run
from launcher.reporting.run_reader import RunData, RunReader
from launcher.run_files.control_requests import wanted
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.file_follower import check_readable
from launcher.run_log.step_line import REWARD
from scripts.run_processes import is_live

PAUSE_FACTOR = 20.0
SILENT_S = 10.0
"""A live run writes now.json once a second, but not while its Coordinator is replaced, which takes some seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeenOnPage:
    """What a page has already. `generation`: it counts as nothing where that is another."""

    generation: str = ""
    facts: int | None = None
    since: int | None = None
    width: int | None = None
    window: Window


class WatchedRun:
    """`answer` is safe to call from several threads."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._lock = threading.Lock()
        self._life = Life(paths)
        self._begin()

    def _begin(self) -> None:
        self._data = RunData()
        self._reader = RunReader(self.paths, self._data)
        self._file = _identity(self.paths)
        self._facts: RunFacts | None = None
        self._version = 0
        self._due_at = 0.0
        self._is_new = True

    def answer(self, seen: SeenOnPage) -> dict[str, object]:
        """Raises JournalError naming a file that can't be read."""
        with self._lock:
            check_readable(self.paths.events, self.paths.ledger, self.paths.metrics)
            if self._file not in (found := _identity(self.paths), None):  # another run of the same name
                self._begin()
            self._file = found
            life = self._life.look_for_life()
            facts = self._refresh(has_ended=life.live is False)
            return self._answer(facts, seen, life)

    def _refresh(self, *, has_ended: bool) -> RunFacts:
        self._is_new |= self._reader.refresh(has_ended=has_ended) > 0
        began = time.monotonic()
        if self._facts is None or (self._is_new and began >= self._due_at):
            self._facts = facts_of_run(self._data, self.paths)
            self._version = self._version + 1
            self._is_new = False
            self._due_at = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - began)
        return self._facts

    def _answer(self, facts: RunFacts, seen: SeenOnPage, life: LifeSigns) -> dict[str, object]:
        figures, window = self._data.figures, seen.window
        kept = facts.kept_lines()
        generation = f"{self._file}.{int(len(kept) - kept.sum())}.{window.first}.{window.last}"
        curves = figures.curves(kept, window)
        if generation == seen.generation and curves["width"] == seen.width and seen.since is not None:
            curves = figures.curves(kept, window, since=seen.since, width=seen.width)
        else:
            curves["undone"] = figures.undone(kept, REWARD, window)
        said: dict[str, object] = {
            "format": FORMAT,
            "generation": generation,
            "facts": self._version,
            **state_of(facts, is_live=life.live, at=time.time(), silent_s=life.silent_s),
            "servers": _servers(read_now(self.paths)) if life.live else [],
            "asked": _asked(self.paths),
            "curves": curves,
        }
        is_known = seen.facts == self._version and generation == seen.generation
        return shown(said if is_known else said | story_of(facts))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LifeSigns:
    """`live` None: it is not known. `silent_s`: for how long its driver was seen to write nothing."""

    live: bool | None
    silent_s: float


class Life:
    """Whether a driver writes: by its lock on this machine, by its beat on another. Not known is None."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._beat: tuple[int, int] | None = None
        self._since = time.monotonic()
        self._has_changed = False

    def look_for_life(self) -> LifeSigns:
        now, at = read_now(self._paths), time.monotonic()
        beat = None if now is None else (now.attempt, now.beat)
        if beat != self._beat:
            self._has_changed = self._beat is not None
            self._beat = beat
            self._since = at
        silent_s = at - self._since
        live = is_live(self._paths)
        if live is None and self._has_changed and silent_s < SILENT_S:
            live = True
        return LifeSigns(live=live, silent_s=silent_s)


def _identity(paths: RunPaths) -> int | None:
    """None where there is no file yet."""
    try:
        return paths.events.stat().st_ino
    except OSError:
        return None


def _servers(now: CurrentStatus | None) -> list[dict[str, object]]:
    keys = ("name", "state", "weight_version", "generation", "reason")
    servers = () if now is None else now.servers
    return [{key: str(getattr(one, key)) if key == "state" else getattr(one, key) for key in keys} for one in servers]


def _asked(paths: RunPaths) -> str:
    """What an operator asked for last, and who; "" where nothing was, or its disk does not say."""
    with contextlib.suppress(StorageError):
        if (asked := wanted(paths)) is not None:
            return f"{asked.wish} {asked.description}"
    return ""
