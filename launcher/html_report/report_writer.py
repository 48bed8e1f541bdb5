"""Writes report.html during a run, from a thread of the driver, and once more when the run has ended.

The trainer is never asked and never waits: everything comes from the run's files. Each page is written completely, by a
rename. What a page costs grows with the run, so the pause after one is at least PAUSE_FACTOR times what it took.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from launcher.base.durable import replace_file
from launcher.base.errors import JournalError
from launcher.base.prompt_order import PromptOrder
from launcher.html_report.page_template import FRAME, MACROS, load_template
from launcher.html_report.report_page import FILES, REPORT, report_page
from launcher.reporting.ledger_audit import NOT_READ
from launcher.reporting.run_facts import RunFacts, facts_of_run
from launcher.reporting.run_reader import RunReader
from launcher.run_files.run_paths import RunPaths

PERIOD_S = 10.0
PAUSE_FACTOR = 100.0
"""A page that took 0.3 s to make is not made again for 30 s: one percent of one core at most."""
JOIN_S = 10.0

log = logging.getLogger(__name__)


def write_report(paths: RunPaths, *, is_live: bool | None, order: PromptOrder | str = NOT_READ) -> RunFacts:
    """Read all that a run has written and put its report beside it. Raises JournalError naming the file.

    `is_live` None: it is not known. `order`: of the data set's prompts, or why it is not known.
    """
    maker = _Maker(paths, order)
    maker.read(has_ended=is_live is not True)
    facts = maker.facts(is_live=is_live)
    maker.write(facts, is_live=is_live)
    return facts


class ReportWriter:
    """From construction until `close` the report follows the run. Nothing here raises, nothing here is waited for."""

    def __init__(
        self, paths: RunPaths, *, period_s: float = PERIOD_S, heard: Callable[[RunFacts], None] = lambda facts: None
    ) -> None:
        """`heard` gets the facts of each page, in the thread of this, before the page is written."""
        self._maker = _Maker(paths)
        self._heard = heard
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The run has ended: write the last page."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():  # else it hangs at the disk, and so would this
            self._turn(is_live=False)

    def _follow(self) -> None:
        for template in (FRAME, MACROS, REPORT):
            load_template(template)  # else the first page takes as long as several, and the second waits for it
        pause_s = self._period_s
        while not self._ended.wait(pause_s):
            began = time.monotonic()
            self._turn(is_live=True)
            pause_s = max(self._period_s, PAUSE_FACTOR * (time.monotonic() - began))

    def _turn(self, *, is_live: bool) -> None:
        try:
            if self._maker.read(has_ended=not is_live) or not is_live:
                facts = self._maker.facts(is_live=is_live)
                self._heard(facts)
                self._maker.write(facts, is_live=is_live)
        except JournalError as error:
            log.warning("%s", error)
        except Exception:  # a picture of the run must never cost the run
            log.exception("report.html could not be made")


class _Maker:
    """Reads what is new in the run's files, and writes the page from all of it."""

    def __init__(self, paths: RunPaths, order: PromptOrder | str = NOT_READ) -> None:
        self._paths = paths
        self._order = order
        self._reader = RunReader(paths)
        self._wrote_s = 0.0

    def read(self, *, has_ended: bool) -> int:
        return self._reader.refresh(has_ended=has_ended)

    def facts(self, *, is_live: bool | None) -> RunFacts:
        return facts_of_run(self._reader.data, self._paths, order=self._order, is_live=is_live)

    def write(self, facts: RunFacts, *, is_live: bool | None) -> None:
        began = time.monotonic()
        patience_s = max(60.0, 6 * max(PERIOD_S, PAUSE_FACTOR * self._wrote_s))
        files = [name for name in FILES if (self._paths.logs / name).exists()]
        content = report_page(facts, written_at=time.time(), is_live=is_live, patience_s=patience_s, files=files)
        try:
            replace_file(self._paths.report, content)
        except OSError as error:
            raise JournalError(
                f"{self._paths.report} was not written: {error.strerror or error}", "is there room, may we write there?"
            ) from error
        self._wrote_s = time.monotonic() - began
