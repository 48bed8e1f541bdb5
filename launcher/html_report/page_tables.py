"""The page's tables: what incidents cost by cause and one by one, the ledger's audit, the checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median

from launcher.html_report.markup import Markup, join, tag, text
from launcher.reporting.incident_facts import IncidentFacts
from launcher.reporting.run_facts import CheckpointSummary, RunFacts

MOST_INCIDENTS = 200
MOST_PROBLEMS = 20
MOST_CHECKPOINTS = 12
LONGEST_WORDS = 400

Cell = tuple[str, object, str]
"""Heading, content, class."""


def table(rows: Sequence[Sequence[Cell]]) -> Markup:
    """On a phone each row is a block with its headings inside. All rows have the headings of the first."""
    head = tag("tr", *(tag("th", heading, class_=css or None) for heading, _, css in rows[0]))
    body = [
        tag("tr", *(tag("td", content, class_=_css(content, css), data_label=heading) for heading, content, css in row))
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="rows"), class_="wide-table")


def _css(content: object, css: str) -> str | None:
    """What is 0 has no line of its own on a phone."""
    return f"{css} zero" if content == 0 and isinstance(content, int) else css or None


def causes_table(facts: RunFacts) -> Markup:
    """MTTD and MTTR, by cause and for all."""
    if not facts.incidents:
        return tag("p", "No incident so far.", class_="none")
    causes = sorted({one.cause for one in facts.incidents})
    rows = [_cause_row(cause, [one for one in facts.incidents if one.cause == cause]) for cause in causes]
    if len(causes) > 1:
        rows.append(_cause_row("all", facts.incidents))
    return table(rows)


def _cause_row(name: str, incidents: Sequence[IncidentFacts]) -> list[Cell]:
    return [
        ("cause", tag("b", name), "head"),
        ("incidents", len(incidents), "n"),
        ("mended", sum(one.is_mended is True for one in incidents), "n"),
        ("MTTD", spread([one.detected_s for one in incidents]), "n"),
        ("MTTR", spread([one.repaired_s for one in incidents]), "n"),
        ("to the next step", spread([one.next_step_s for one in incidents]), "n"),
        ("steps taken back", sum(one.steps_back for one in incidents), "n"),
        ("batches rejected", sum(one.batches_rejected for one in incidents), "n"),
    ]


def spread(values: Sequence[float | None]) -> str:
    """`4.2 s (3.1 to 9.0)`: the median, and the range where there are several."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "—"
    if len(known) == 1:
        return seconds(known[0])
    return f"{seconds(median(known))} ({seconds(min(known))} to {seconds(max(known))})"


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "—"
    if value < 0.1:
        return f"{1000 * max(value, 0.0):.0f} ms"
    if value < 1:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def when(at: float) -> str:
    """In the time of the machine that writes the page."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def incidents_table(facts: RunFacts) -> Markup:
    """The newest first."""
    shown = list(reversed(facts.incidents))[:MOST_INCIDENTS]
    if not shown:
        return Markup("")
    rows: list[list[Cell]] = [_incident_row(one) for one in shown]
    left_out = len(facts.incidents) - len(shown)
    more = tag("p", f"{left_out} earlier ones stand in events.jsonl.", class_="faint") if left_out else ""
    many = len(shown) > 8
    body = join(table(rows), more)
    return tag("details", tag("summary", f"each of the {len(shown)} incidents"), body) if many else body


def _incident_row(one: IncidentFacts) -> list[Cell]:
    return [
        ("", _number(one), ""),
        ("", _what(one), "words"),
        ("step", one.step, "n"),
        ("detected", seconds(one.detected_s), "n"),
        ("repaired", seconds(one.repaired_s), "n"),
        ("next step", seconds(one.next_step_s), "n"),
        ("steps back", one.steps_back, "n"),
    ]


def _number(one: IncidentFacts) -> Markup:
    name = f"#{one.number}"
    return tag("a", name, href=f"incidents/{one.number}/") if one.has_folder else text(name)


def _what(one: IncidentFacts) -> Markup:
    css = "good" if one.is_mended else "bad"
    word = "open" if one.is_mended is None else "mended" if one.is_mended else "not mended"
    end = f"{word}: {one.end_reason}" if one.end_reason else word
    done = tag("p", "; ".join(one.actions)[:LONGEST_WORDS], class_="faint") if one.actions else ""
    doing = f"; {one.doing}" if one.doing and one.is_mended is None else ""
    return join(tag("p", one.what, doing), tag("p", end, class_=css), done)


def audit_section(facts: RunFacts) -> Markup:
    audit = facts.audit
    if audit is None:
        return tag("p", "There is no ledger to audit yet.", class_="none")
    verdict = (
        tag("p", tag("b", "It adds up: ", class_="good"), "each step once, each prompt once in its epoch, each on its "
            "own weights.")
        if not audit.problems
        else tag("p", tag("b", f"{len(audit.problems)} violations", class_="bad"))
    )  # fmt: skip
    distance = "not measured" if math.isnan(audit.largest_distance) else f"{audit.largest_distance:.1e} nats"
    figures = (
        f"{audit.steps:,} steps stand, {audit.taken_back:,} lines were taken back, {audit.prompts:,} prompts met. "
        f"Rollouts: {facts.rollouts_failed:,} failed, {facts.rollouts_retried:,} retried. Largest mean distance "
        f"between the server's and the trainer's log-probs: {distance}."
    )
    problems = [tag("li", problem[:LONGEST_WORDS]) for problem in audit.problems[:MOST_PROBLEMS]]
    more = len(audit.problems) - len(problems)
    return join(
        verdict,
        tag("ul", *problems, tag("li", f"and {more} more") if more > 0 else "", class_="plain") if problems else "",
        tag("p", figures, class_="faint"),
    )


def checkpoints_section(checkpoints: Sequence[CheckpointSummary]) -> Markup:
    if not checkpoints:
        return tag("p", "No checkpoint so far.", class_="none")
    kept = [one for one in checkpoints if not one.fate]
    condemned = sum(one.fate == "condemned" for one in checkpoints)
    shown = [one for one in reversed(checkpoints) if not one.fate or one.fate in ("condemned", "damaged")]
    rows: list[list[Cell]] = [
        [
            ("step", one.step, "n"),
            ("saved", when(one.time), ""),
            ("took", seconds(one.seconds), "n"),
            ("state", one.fate or "there", ""),
        ]
        for one in shown[:MOST_CHECKPOINTS]
    ]
    said = f"{len(checkpoints):,} were made, {len(kept):,} are there"
    said += f", {condemned:,} condemned" if condemned else ""
    return join(tag("p", f"{said}."), table(rows) if rows else "")
