"""Writes report.html during a run, from a thread of the driver, and once more when the run has ended.

The trainer is never asked and never waits: everything comes from the run's files. Each page is written completely, by a
rename. What a page costs grows with the run, so the pause after one is at least PAUSE_FACTOR times what it took.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable

from launcher.base.durable import replace_file
from launcher.base.errors import JournalError
from launcher.base.own_python import python
from launcher.base.prompt_order import PromptOrder
from launcher.html_report.page import render_page
from launcher.html_report.page_facts import page_facts, shown
from launcher.reporting.ledger_audit import NOT_READ
from launcher.reporting.run_facts import RunFacts, facts_of_run
from launcher.reporting.run_reader import RunReader
from launcher.reporting.samples import samples_around, samples_of_steps
from launcher.run_files.run_paths import RunPaths
from launcher.run_log.line_values import as_integer

PERIOD_S = 10.0
PAUSE_FACTOR = 100.0
"""A page that took 0.3 s to make is not made again for 30 s: one percent of one core at most."""
JOIN_S = 10.0
MOST_INCIDENTS = 100
"""The newest, whose completions are in the page."""
LONGEST_SAMPLES = 400_000
"""Characters of completions in a page: those of the newest steps are kept, or a page would be as long as its run."""
FILES = (
    *("summary.txt", "metrics.jsonl", "ledger.jsonl", "events.jsonl", "memory.jsonl", "trainer.log", "ray.log"),
    *("config.yaml", "incidents/"),
)

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
        pause_s = self._period_s
        while not self._ended.wait(pause_s):
            began = time.monotonic()
            self._turn(is_live=True)
            pause_s = max(self._period_s, PAUSE_FACTOR * (time.monotonic() - began))

    def _turn(self, *, is_live: bool) -> None:
        try:
            # Also where nothing is new, as in a long step: a page that grows old says that the driver may be gone.
            self._maker.read(has_ended=not is_live)
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
        self._began = 0.0
        self._wrote_s = 0.0

    def read(self, *, has_ended: bool) -> None:
        self._began = time.monotonic()
        self._reader.refresh(has_ended=has_ended)

    def facts(self, *, is_live: bool | None) -> RunFacts:
        return facts_of_run(self._reader.data, self._paths, order=self._order, is_live=is_live)

    def write(self, facts: RunFacts, *, is_live: bool | None) -> None:
        began = time.monotonic()
        content = render_page(self._content(facts, is_live=is_live))
        try:
            replace_file(self._paths.report, content)
        except OSError as error:
            raise JournalError(
                f"{self._paths.report} was not written: {error.strerror or error}", "is there room, may we write there?"
            ) from error
        self._wrote_s = time.monotonic() - began

    def _content(self, facts: RunFacts, *, is_live: bool | None) -> dict[str, object]:
        """With what only a file has. `patience_s`: a live page that is older says that it is. The pause after this page
        is known when it is written: by then it has taken what was taken so far, and the write that the last one took.
        """
        at = time.time()
        took_s = time.monotonic() - self._began + self._wrote_s
        names = f"--experiment-name {shlex.quote(facts.experiment_name)} --trial-name {shlex.quote(facts.trial_name)}"
        added: dict[str, object] = {
            "written_at": at,
            "patience_s": max(60.0, 6 * max(PERIOD_S, PAUSE_FACTOR * took_s)),
            "command": f"{python()} -m scripts.report {names}",
            "files": [name for name in FILES if (self._paths.logs / name).exists()],
            "samples": self._samples(facts, is_live=is_live),
        }
        return page_facts(facts, is_live=is_live, at=at) | shown(added)

    def _samples(self, facts: RunFacts, *, is_live: bool | None) -> dict[str, object]:
        """Completions by their step: of the newest and the one before, and once the run has ended those of incidents
        too: for them all of samples.jsonl is read."""
        found: dict[int, list[dict[str, object]]] = {}
        for line in samples_around(self._paths, None):
            found.setdefault(as_integer(line.get("global_step")) or 0, []).append(line)
        if is_live is not True:
            steps = {step for one in facts.incidents[-MOST_INCIDENTS:] for step in (one.step - 1, one.step)}
            found |= samples_of_steps(self._paths, steps)
        kept: dict[str, object] = {}
        room = LONGEST_SAMPLES
        for step, lines in sorted(found.items(), reverse=True):
            room -= sum(len(str(text)) for line in lines for text in line.values())
            if room < 0:
                break
            kept[str(step)] = lines
        return kept
