"""report.html: one file that shows a whole run. No network, no scripts but one, nothing of a run is ever executed.

Top to bottom it answers: how did it go, what did it learn, what happened on the way and what did that cost, where did
the time go, is the ledger in order, what can be resumed from.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from statistics import fmean, median

from launcher.html_report.markup import NOTHING, Markup, join, tag
from launcher.html_report.page_style import SCRIPT, STYLE
from launcher.html_report.page_tables import (
    audit_section,
    causes_table,
    checkpoints_section,
    incidents_table,
    seconds,
    spread,
    when,
)
from launcher.html_report.reward_chart import reward_chart
from launcher.html_report.series_charts import GIB, memory_chart, tokens_chart
from launcher.html_report.timeline import timeline
from launcher.reporting.run_facts import RunFacts
from launcher.reporting.run_progress import MEAN_OVER_STEPS

FILES = (
    *("summary.txt", "metrics.jsonl", "ledger.jsonl", "events.jsonl", "memory.jsonl", "trainer.log", "ray.log"),
    *("config.yaml", "incidents/"),
)
MEANINGS = (
    ("MTTD", "from when a failure began, as well as the run itself can know it, to the moment its journal said so"),
    ("MTTR", "from when it began until its subject worked again; a server: until it served the current weights"),
    ("to the next step", "from when it began to the next committed step"),
    ("ETTR", "time of the steps that stand, as a share of the time of all attempts"),
    ("strict", "the same, where a step during an incident counts as no longer than the usual one: waiting is lost"),
    ("semantic", "ETTR with the steps counted as lost that were trained on what turned out to be bad and still stand"),
    ("L", "usual steps lost per incident, by the strict measure: start-up and all waiting included"),
)


def page(facts: RunFacts, *, written_at: float, is_live: bool | None, patience_s: float = 600.0) -> bytes:
    """The file's content. `is_live` None: nobody could tell. `patience_s`: a live page older than that says so."""
    name = f"{facts.experiment_name} / {facts.trial_name}"
    body = tag(
        "main",
        _head(facts, name, is_live, written_at),
        _tiles(facts),
        _card("Reward", reward_chart(facts)),
        _card("Incidents: detection and repair", causes_table(facts), incidents_table(facts)),
        _card("Where the time went", timeline(facts), _time_text(facts)),
        _card("Tokens per second", tokens_chart(facts)),
        _card("Memory in use", memory_chart(facts)),
        _card("Ledger", audit_section(facts)),
        _card("Checkpoints", checkpoints_section(facts.checkpoints)),
        _foot(facts),
    )
    document = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=_policy()),
            tag("title", name),
            tag("style", Markup(STYLE)),
        ),
        tag("body", body, tag("script", Markup(SCRIPT))),
        lang="en",
        data_written=f"{written_at:.0f}",
        data_live="yes" if is_live and not facts.word else "no",
        data_patience=f"{patience_s:.0f}",
    )
    return f"<!doctype html>{document}\n".encode("utf-8", "replace")


def _policy() -> str:
    """Nothing is fetched, and no script runs but the page's own: also what escaping might have missed."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _card(title: str, *children: object) -> Markup:
    return tag("section", tag("h2", title), *children, class_="card")


def _head(facts: RunFacts, name: str, is_live: bool | None, written_at: float) -> Markup:
    word, css, said = _word(facts, is_live)
    started = when(facts.attempts[0].start) if facts.attempts else "not yet"
    attempts = f", {len(facts.attempts)} attempts" if len(facts.attempts) > 1 else ""
    idle = f" and {seconds(facts.clock.idle_s)} between them" if facts.clock.idle_s >= 60 else ""
    times = f"started {started}; ran for {seconds(facts.clock.total_s)}{attempts}{idle}; written {when(written_at)}"
    return tag(
        "header",
        tag("div", tag("h1", name), tag("span", word, class_=f"word {css}"), class_="top"),
        tag("p", said) if said else NOTHING,
        tag("p", times, class_="faint"),
        _late(facts) if is_live and not facts.word else NOTHING,
    )


def _word(facts: RunFacts, is_live: bool | None) -> tuple[str, str, str]:
    """What is written in the badge, its class, and the reason."""
    if facts.word:
        return facts.word, "good" if facts.word == "FINISHED" else "bad", facts.reason
    if is_live is False:
        return "ENDED WITHOUT A WORD", "bad", "its driver is gone and wrote no last word; the same command resumes it"
    if not facts.states:
        return "NOT STARTED", "", ""
    _, state, reason = facts.states[-1]
    return (state, "live", reason) if is_live else (f"{state} WHEN LAST SEEN", "", reason)


def _late(facts: RunFacts) -> Markup:
    words = ["python -m scripts.report --experiment-name", shlex.quote(facts.experiment_name), "--trial-name"]
    command = " ".join([*words, shlex.quote(facts.trial_name)])
    said = "This page has not been written for long: the run's driver may be gone. What is known now: "
    return tag("p", said, tag("code", command), class_="notice bad", id="late", hidden="hidden")


def _tiles(facts: RunFacts) -> Markup:
    return tag("div", *(tag("div", *tile, class_="tile") for tile in _tile_rows(facts)), class_="tiles")


def _tile_rows(facts: RunFacts) -> list[tuple[Markup, ...]]:
    return [
        _reward_tile(facts),
        _steps_tile(facts),
        _ettr_tile(facts),
        _incident_tile(facts),
        _tile(spread([one.repaired_s for one in facts.incidents]).partition(" (")[0], "median time to repair"),
        _tokens_tile(facts),
        _memory_tile(facts),
        _audit_tile(facts),
    ]


def _tile(value: object, words: str, css: str = "") -> tuple[Markup, ...]:
    return tag("b", value, class_=css or None), tag("span", words)


def _reward_tile(facts: RunFacts) -> tuple[Markup, ...]:
    rewards = [line.reward for line in facts.steps if math.isfinite(line.reward)]
    if not rewards:
        return _tile("—", "reward")
    first, last = fmean(rewards[:MEAN_OVER_STEPS]), fmean(rewards[-MEAN_OVER_STEPS:])
    return _tile(f"{first:.3g} → {last:.3g}", f"reward, first and last {MEAN_OVER_STEPS} steps")


def _steps_tile(facts: RunFacts) -> tuple[Markup, ...]:
    back = sum(map(len, facts.taken_back))
    total = f" of {facts.total_steps:,}" if facts.total_steps is not None else ""
    return _tile(f"{len(facts.steps):,}{total}", f"steps stand; {back:,} were taken back")


def _ettr_tile(facts: RunFacts) -> tuple[Markup, ...]:
    losses = facts.losses
    semantic = "not known" if losses.semantic is None else _percent(losses.semantic)
    per = losses.lost_steps_per_incident
    lost = f"; L {per:.1f} steps" if per is not None else ""
    return _tile(_percent(losses.ettr), f"ETTR; strict {_percent(losses.strict)}, semantic {semantic}{lost}")


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{share:.1%}"


def _incident_tile(facts: RunFacts) -> tuple[Markup, ...]:
    mended = sum(one.is_mended is True for one in facts.incidents)
    opened = sum(one.is_mended is None for one in facts.incidents)
    words = f"incidents; {mended} mended" + (f", {opened} open" if opened else "")
    words += f"; {facts.rejected:,} batches rejected" if facts.rejected else ""
    return _tile(len(facts.incidents), words, "bad" if mended < len(facts.incidents) else "")


def _tokens_tile(facts: RunFacts) -> tuple[Markup, ...]:
    rates = [line.tokens_per_s for line in facts.steps if math.isfinite(line.tokens_per_s)]
    if not rates:
        return _tile("—", "tokens/s")
    return _tile(f"{median(rates[-MEAN_OVER_STEPS:]):,.0f}", f"tokens/s of late; {median(rates):,.0f} over all")


def _memory_tile(facts: RunFacts) -> tuple[Markup, ...]:
    shares = [
        (used / there, name, used)
        for reading in facts.memory
        for name, (used, there) in reading.in_use.items()
        if there > 0 and math.isfinite(used / there)
    ]
    if not shares:
        return _tile("—", "memory")
    share, name, used = max(shares)
    return _tile(f"{share:.0%}", f"peak: {name}, {used / GIB:.1f} GiB", "bad" if share > 0.95 else "")


def _audit_tile(facts: RunFacts) -> tuple[Markup, ...]:
    if facts.audit is None:
        return _tile("—", "ledger")
    if facts.audit.problems:
        return _tile(len(facts.audit.problems), "violations in the ledger", "bad")
    return _tile("adds up", "ledger: nothing lost, doubled or stale", "good")


def _time_text(facts: RunFacts) -> Markup:
    losses = facts.losses
    usual = f"a usual step takes {seconds(losses.usual_step_s)}; " if losses.usual_step_s is not None else ""
    bad = "" if losses.bad_steps is None else f"; {losses.bad_steps} steps that stand were trained on bad data"
    words = f"{usual}{seconds(losses.standing_s)} of {seconds(losses.wall_s)} went into steps that stand{bad}"
    return tag("p", words, class_="faint")


def _foot(facts: RunFacts) -> Markup:
    meanings = [part for word, meaning in MEANINGS for part in (tag("dt", word), tag("dd", meaning))]
    links = [join(tag("a", name, href=name), " ") for name in FILES]
    return tag(
        "footer",
        tag("details", tag("summary", "what the measures mean"), tag("dl", *meanings)),
        tag("p", "Beside this file: ", *links, class_="faint"),
    )
