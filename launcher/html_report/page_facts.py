"""The facts of a run as JSON: the only thing that the page knows of it, in report.html and in the answers of `watch`.

`page_facts` has these keys. Times are unix seconds where a name ends in `_at`, seconds where it ends in `_s`; what is
not known is null. `state_of` and `story_of` are the parts that `watch` sends at different moments.

    format                      FORMAT; its number grows where a key changes its meaning or goes
    status                      [word, look (good, bad, live or ""), reason]
    life                        live (null: not known), silent_s
    last_step, last_step_age_s  of the newest step that stands
    usual_step_s                the median
    title, total_steps          experiment / trial
    attempts, ran_s, idle_s     each attempt's number, start_at and at_s (its place in the run's time); between them
    learning                    first and last: mean reward of the first and last `over` steps; steps: with a reward
    health                      incidents, mended, over, open
    time                        wall_s = kept_s (steps that stand) + startup_s + undone_s + the rest; faults_s; shares
    cost                        of_faults, of_all, price_per_hour; null without run.price_per_hour
    steps                       kept, undone, rejected (batches)
    rollouts                    failed, retried
    tokens_per_s                lately, median; null
    memory                      x (at_s), series: shares of what there is; peaks: [used, there] in bytes
    ledger                      problems, not_known, counts, undone, filtered, largest_distance, steps, complete_until
    charts                      title, unit, keys, is_further
    curves                      x, width, steps, series {key: mean, low, high, not_finite}, undone [[step, reward]]
    evals                       [policy_version, sampled, greedy, {dataset: [sampled, greedy]}, prompts not scored]
    restores                    [step, steps_back, reason]
    incidents                   the newest; left_out of them: incidents_left_out
    causes                      by cause: incidents, repaired, [median, least, most] of three times, steps, batches
    checkpoints                 made, there, condemned, steps, bad_steps, newest [step, at, took_s, fate]
    lanes                       name, spans [from, to (shares of ran_s), look, text]
    settings                    {dotted key: text}
    not_read                    lines and files that say nothing

report.html adds written_at, patience_s, command, files and samples {step: completions}; `watch` adds generation, facts,
servers and asked (launcher/html_report/report_writer.py, scripts/watch_page/watched_run.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from launcher.html_report.lanes import lanes_of
from launcher.reporting.event_lines import incident_title
from launcher.reporting.figures import Window, charts_of
from launcher.reporting.run_facts import RunFacts, finite
from launcher.reporting.run_view import MEAN_OVER_STEPS
from launcher.reporting.terminal_text import visible
from launcher.run_files.run_ends import GONE
from launcher.run_log.incident_facts import IncidentFacts
from launcher.run_log.step_line import REWARD

FORMAT = "grpo-page/1"
MOST_INCIDENTS, MOST_PROBLEMS, MOST_CHECKPOINTS, MOST_READINGS = 500, 20, 12, 600
LONGEST_TEXT = 400
LONGEST_SETTING = 300
Json = dict[str, object]


def page_facts(facts: RunFacts, *, is_live: bool | None, at: float) -> Json:
    """All of a run as it is `at` a unix time."""
    curves = facts.figures.curves(facts.kept_lines())
    curves["undone"] = facts.figures.undone(facts.kept_lines(), REWARD, Window())
    whole = {"format": FORMAT, **state_of(facts, is_live=is_live, at=at), **story_of(facts), "curves": curves}
    return shown(whole)


def shown(content: Json) -> Json:
    """With no character in any text that turns the reading direction or shows nothing."""
    return {visible(key): _shown(value) for key, value in content.items()}


def _shown(value: object) -> object:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(key)): _shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        is_curve = bool(value) and isinstance(value[0], float) and not isinstance(value[-1], str)  # has no text
        return value if is_curve else [_shown(one) for one in value]
    return value


def state_of(facts: RunFacts, *, is_live: bool | None, at: float, silent_s: float = 0.0) -> Json:
    """What may change with each step."""
    last = facts.steps[-1] if facts.steps else None
    return {
        "status": status_of(facts, is_live),
        "life": {"live": is_live, "silent_s": silent_s},
        "last_step": None if last is None else last.step,
        "last_step_age_s": None if last is None or not last.time else at - last.time,
        "usual_step_s": facts.losses.usual_step_s,
    }


def status_of(facts: RunFacts, is_live: bool | None) -> tuple[str, str, str]:
    """Text of the badge, its look, and the reason."""
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


def story_of(facts: RunFacts) -> Json:
    """What changes seldom, without the curves."""
    losses, incidents = facts.losses, facts.incidents
    fates = [one.fate for one in facts.checkpoints]
    return {
        "title": facts.title,
        "total_steps": facts.total_steps,
        "attempts": [
            {"number": one.number, "start_at": one.start, "at_s": facts.clock.at(one.start)} for one in facts.attempts
        ],
        "ran_s": facts.clock.total_s,
        "idle_s": facts.clock.idle_s,
        "learning": {
            "first": facts.reward_first,
            "last": facts.reward_last,
            "over": MEAN_OVER_STEPS,
            "steps": len(finite(line.reward for line in facts.steps)),
        },
        "health": {
            "incidents": len(incidents),
            "mended": sum(one.is_mended is True for one in incidents),
            "over": sum(one.is_over for one in incidents),
            "open": sum(one.is_mended is None for one in incidents),
        },
        "time": {
            "wall_s": losses.wall_s,
            "kept_s": losses.standing_s,
            "startup_s": losses.startup_s,
            "undone_s": losses.undone_s,
            "faults_s": losses.faults_s,
            "ettr": losses.ettr,
            "strict": losses.strict,
            "semantic": losses.semantic,
            "bad_steps": losses.bad_steps,
            "lost_steps_per_incident": losses.lost_steps_per_incident,
        },
        "cost": _cost(facts),
        "steps": {
            "kept": len(facts.steps),
            "undone": sum(map(len, facts.taken_back)),
            "rejected": facts.rejected,
        },
        "rollouts": {"failed": facts.rollouts_failed, "retried": facts.rollouts_retried},
        "tokens_per_s": _tokens(facts),
        "memory": _memory(facts),
        "ledger": _ledger(facts),
        "charts": charts_of(facts.figures.keys),
        "evals": [
            [one.policy_version, one.sampled, one.greedy, dict(one.by_dataset), one.unscored] for one in facts.evals
        ],
        "restores": [[one.step, one.steps_back, one.reason] for one in facts.restores],
        "incidents": [_incident(one, facts) for one in incidents[-MOST_INCIDENTS:]],
        "incidents_left_out": max(len(incidents) - MOST_INCIDENTS, 0),
        "causes": list(_by_cause(incidents)),
        "checkpoints": {
            "made": len(fates),
            "there": fates.count(""),
            "condemned": fates.count("condemned"),
            "steps": [one.step for one in facts.checkpoints],
            "bad_steps": [one.step for one in facts.checkpoints if one.fate in ("condemned", "damaged")],
            "newest": [
                [one.step, one.time, one.seconds, one.fate]
                for one in reversed(facts.checkpoints)
                if one.fate in ("", "condemned", "damaged")
            ][:MOST_CHECKPOINTS],
        },
        "lanes": lanes_of(facts),
        "settings": dict(flat_settings(facts.settings)),
        "not_read": list(facts.not_read),
    }


def _cost(facts: RunFacts) -> Json | None:
    if facts.cost is None:
        return None
    of_faults, of_all = facts.cost
    return {"of_faults": of_faults, "of_all": of_all, "price_per_hour": facts.price_per_hour}


def _tokens(facts: RunFacts) -> Json | None:
    rates = finite(line.tokens_per_s for line in facts.steps)
    return {"lately": median(rates[-MEAN_OVER_STEPS:]), "median": median(rates)} if rates else None


def _memory(facts: RunFacts) -> Json:
    """Thinned by leaving out all but the highest of neighbours."""
    names = sorted({name for reading in facts.memory for name in reading.in_use})
    size = max(-(-len(facts.memory) // MOST_READINGS), 1)
    groups = [facts.memory[start : start + size] for start in range(0, len(facts.memory), size)]
    shares = {name: [_most(_share(one.in_use.get(name)) for one in group) for group in groups] for name in names}
    pairs = {name: [one.in_use[name] for one in facts.memory if name in one.in_use] for name in names}
    peaks = {name: max(known) for name in names if (known := [p for p in pairs[name] if math.isfinite(p[0])])}
    return {"x": [facts.clock.at(group[0].time) for group in groups], "series": shares, "peaks": peaks}


def _share(pair: tuple[float, float] | None) -> float:
    return math.nan if pair is None or not pair[1] > 0 else pair[0] / pair[1]


def _most(values: Iterable[float]) -> float | None:
    return max(finite(values), default=None)


def _ledger(facts: RunFacts) -> Json | None:
    """`complete_until`: the last step up to which nothing is lost; null where that is not known."""
    audit = facts.audit
    if audit is None:
        return None
    return {
        "problems": [one[:LONGEST_TEXT] for one in audit.problems[:MOST_PROBLEMS]],
        "violations": len(audit.problems),
        "not_known": [one[:LONGEST_TEXT] for one in audit.not_known],
        "counts": audit.counts,
        "undone": audit.taken_back,
        "filtered": audit.filtered,
        "largest_distance": audit.largest_distance,
        "steps": audit.steps,
        "complete_until": audit.loss_known_until,
    }


def _by_cause(incidents: Sequence[IncidentFacts]) -> Iterator[Json]:
    for cause in sorted({one.cause for one in incidents}):
        group = [one for one in incidents if one.cause == cause]
        yield {
            "cause": cause,
            "incidents": len(group),
            "repaired": sum(one.is_mended is True for one in group),
            "detected_s": _spread(one.detected_s for one in group),
            "repaired_s": _spread(one.repaired_s for one in group),
            "next_step_s": _spread(one.next_step_s for one in group),
            "steps_back": sum(one.steps_back for one in group),
            "batches_rejected": sum(one.batches_rejected for one in group),
        }


def _spread(values: Iterable[float | None]) -> tuple[float, float, float] | None:
    known = finite(value for value in values if value is not None)
    return (median(known), min(known), max(known)) if known else None


def _incident(one: IncidentFacts, facts: RunFacts) -> Json:
    return {
        "number": one.number,
        "step": one.step,
        "at_s": facts.clock.at(one.began_at),
        "title": incident_title(one.cause, one.subject),
        "what": one.what,
        "doing": one.doing if one.is_mended is None else one.end_reason,
        "actions": "; ".join(one.actions)[:LONGEST_TEXT],
        "how": one.outcome,
        "is_over": one.is_over,
        "detected_s": one.detected_s,
        "repaired_s": one.repaired_s,
        "next_step_s": one.next_step_s,
        "steps_back": one.steps_back,
        "has_folder": one.has_folder,
    }


def flat_settings(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """By their dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ("null" if value is None else str(value))[:LONGEST_SETTING]
