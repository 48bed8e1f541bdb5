"""Fills report.html.j2: one file that shows a complete run, without network, with one inline script.

From top to bottom it answers: how did it end, what did it learn, what happened on the way and what did that cost, where
did the time go, is the ledger complete, which checkpoints are there.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from statistics import median

from launcher.base.own_python import python
from launcher.base.wording import counted
from launcher.html_report.page_template import TEMPLATES, render_page
from launcher.html_report.reward_chart import reward_chart
from launcher.html_report.time_charts import GIB, memory_chart, timeline_chart, tokens_chart
from launcher.html_report.training_charts import training_charts
from launcher.reporting.formats import NONE, percent, seconds, spread
from launcher.reporting.run_facts import RunFacts, finite
from launcher.reporting.run_view import MEAN_OVER_STEPS
from launcher.run_files.run_ends import GONE
from launcher.run_log.incident_facts import IncidentFacts

MOST_INCIDENTS, MOST_PROBLEMS, MOST_CHECKPOINTS = 200, 20, 12
LONGEST_TEXT = 400
FILES = (
    *("summary.txt", "metrics.jsonl", "ledger.jsonl", "events.jsonl", "memory.jsonl", "trainer.log", "ray.log"),
    *("config.yaml", "incidents/"),
)

REPORT = TEMPLATES / "report.html.j2"

Tile = tuple[object, str, str]
"""Value, text, class."""


def report_page(
    facts: RunFacts, *, written_at: float, is_live: bool | None, patience_s: float = 600.0, files: Sequence[str] = FILES
) -> bytes:
    """The file's content. `is_live` None: it is not known. `patience_s`: a live page older than that shows it. `files`:
    those that lie beside it."""
    word, css, reason = status_of(facts, is_live)
    names = f"--experiment-name {shlex.quote(facts.experiment_name)} --trial-name {shlex.quote(facts.trial_name)}"
    shown = [one for one in reversed(facts.checkpoints) if one.fate in ("", "condemned", "damaged")]
    training, further = training_charts(facts)
    return render_page(
        REPORT,
        training=training,
        further=further,
        script=TEMPLATES / "refresh.js",
        title=facts.title,
        facts=facts,
        word=word,
        word_class=css,
        reason=reason,
        command=f"{python()} -m scripts.report {names}",
        written_at=written_at,
        is_live=bool(is_live and not facts.word),
        patience_s=patience_s,
        tiles=list(tiles_of(facts)),
        reward=reward_chart(facts),
        timeline=timeline_chart(facts),
        time_text=_time_text(facts),
        tokens=tokens_chart(facts),
        memory=memory_chart(facts),
        causes=list(_by_cause(facts)),
        incidents=list(reversed(facts.incidents))[:MOST_INCIDENTS],
        most_problems=MOST_PROBLEMS,
        checkpoints=shown[:MOST_CHECKPOINTS],
        longest_text=LONGEST_TEXT,
        files=files,
    )


def status_of(facts: RunFacts, is_live: bool | None) -> tuple[str, str, str]:
    """Text of the badge, its class, and the reason."""
    if facts.word:
        return facts.word, "good" if facts.word == "FINISHED" else "bad", facts.reason
    if not facts.attempts:
        return "NOT STARTED", "", ""
    if is_live is False:
        return "ENDED WITHOUT A STATUS", "bad", GONE
    if not facts.states:
        return "NOT STARTED", "", ""
    _, state, reason = facts.states[-1]
    return (state, "live", reason) if is_live else (f"{state} WHEN LAST SEEN", "", reason)


def _by_cause(facts: RunFacts) -> Iterator[tuple[str, list[IncidentFacts]]]:
    causes = sorted({one.cause for one in facts.incidents})
    for cause in causes:
        yield cause, [one for one in facts.incidents if one.cause == cause]
    if len(causes) > 1:
        yield "all", list(facts.incidents)


def tiles_of(facts: RunFacts) -> Iterator[Tile]:
    """First what a person asks first: is it learning, is it healthy, what was lost."""
    yield _learning_tile(facts)
    yield _health_tile(facts)
    yield _loss_tile(facts)
    yield from _cost_tile(facts)
    total = f" of {facts.total_steps:,}" if facts.total_steps is not None else ""
    yield f"{len(facts.steps):,}{total}", "steps kept", ""
    yield spread([one.repaired_s for one in facts.incidents]).partition(" (")[0], "median time to repair", ""
    yield _tokens_tile(facts)
    yield _memory_tile(facts)
    yield _audit_tile(facts)


def _learning_tile(facts: RunFacts) -> Tile:
    if facts.reward_first is None:
        return NONE, "learning: no reward seen yet", ""
    held_out = ""
    if len(facts.evals) > 1:
        held_out = f"; held-out, greedy {facts.evals[0].greedy:.3g} → {facts.evals[-1].greedy:.3g}"
    if (steps := len(facts.steps)) <= MEAN_OVER_STEPS:  # all of them are the first ones and the last
        return f"{facts.reward_last:.3g}", f"learning: reward of {counted(steps, 'step')}{held_out}", ""
    words = f"learning: reward of the first and last {MEAN_OVER_STEPS} steps{held_out}"
    return f"{facts.reward_first:.3g} → {facts.reward_last:.3g}", words, ""


def _health_tile(facts: RunFacts) -> Tile:
    """Of what the run itself noticed."""
    count, over = len(facts.incidents), sum(one.is_over for one in facts.incidents)
    mended, opened = (sum(one.is_mended is state for one in facts.incidents) for state in (True, None))
    value = f"{opened} open" if opened else f"{count - over} not repaired" if count > over else f"{count} over"
    value = f"{count} repaired" if mended == count else value
    words = f"health: of {count} incident{'s' * (count != 1)}" if count else "health: no incident was noticed"
    return value if count else "0", words, "bad" if over < count else ""


def _loss_tile(facts: RunFacts) -> Tile:
    losses, back = facts.losses, sum(map(len, facts.taken_back))
    semantic = "not known" if losses.semantic is None else percent(losses.semantic)
    words = f"lost: {counted(back, 'step')} undone, rejected batches: {facts.rejected:,}; time kept (ETTR) "
    kept, strict = percent(losses.ettr), percent(losses.strict)
    words += kept if kept == strict == semantic else f"{kept}, strict {strict}, semantic {semantic}"
    if (per := losses.lost_steps_per_incident) is not None:
        words += f"; {per:.1f} usual steps lost per incident"
    return counted(back, "step"), words, ""


def _cost_tile(facts: RunFacts) -> Iterator[Tile]:
    if facts.cost is not None:
        of_faults, of_all = facts.cost
        lost, ran = seconds(facts.losses.faults_s), seconds(facts.losses.wall_s)
        words = f"what faults cost, of {of_all:,.2f} (at {facts.price_per_hour:g} an hour): {lost} of {ran}"
        yield f"{of_faults:,.2f}", words, ""


def _tokens_tile(facts: RunFacts) -> Tile:
    rates = finite(line.tokens_per_s for line in facts.steps)
    if not rates:
        return NONE, "tokens/s", ""
    return f"{median(rates[-MEAN_OVER_STEPS:]):,.0f}", f"tokens/s lately; {median(rates):,.0f} over all", ""


def _memory_tile(facts: RunFacts) -> Tile:
    shares = [
        (used / there, name, used)
        for reading in facts.memory
        for name, (used, there) in reading.in_use.items()
        if there > 0 and math.isfinite(used / there)
    ]
    if not shares:
        return NONE, "memory", ""
    share, name, used = max(shares)
    return f"{share:.0%}", f"peak: {name}, {used / GIB:.1f} GiB", "bad" if share > 0.95 else ""


def _audit_tile(facts: RunFacts) -> Tile:
    if facts.audit is None:
        return NONE, "ledger", ""
    if facts.audit.problems:
        return len(facts.audit.problems), "violations in the ledger", "bad"
    if not facts.audit.is_loss_known:
        return "not known", "ledger: nothing doubled or stale; whether something is lost is not known", ""
    if (until := facts.audit.loss_known_until) != facts.audit.steps - 1:
        return "complete", f"ledger: nothing doubled or stale; nothing lost up to step {until}", "good"
    return "complete", "ledger: nothing lost, doubled or stale", "good"


def _time_text(facts: RunFacts) -> str:
    losses = facts.losses
    usual = f"a usual step takes {seconds(losses.usual_step_s)}; " if losses.usual_step_s is not None else ""
    bad = "" if losses.bad_steps is None else f"; {losses.bad_steps} of these steps were trained on bad data"
    return f"{usual}{seconds(losses.standing_s)} of {seconds(losses.wall_s)} went into steps that were kept{bad}"
