"""The last thing a run prints: its word and why, what it learned, what that cost, where it lies, what to do next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from launcher.base.durable import replace_file
from launcher.base.errors import JournalError, LauncherError
from launcher.base.messages import EvalReport, RunOutcome, TerminalStatus
from launcher.checkpoints.checkpoint_store import CheckpointState, CheckpointStore
from launcher.reporting.reward_curve import curve_of, draw_curve
from launcher.reporting.run_records import KEPT_PREFIX, RunRecords, StepFigures, read_records
from launcher.reporting.run_view import MEAN_OVER_STEPS, STEP_SECONDS
from launcher.reporting.terminal_panel import duration
from launcher.run_files.run_paths import RunPaths

ROLLOUT, TRAIN = "timeperf/rollout_s", "timeperf/train_s"
TOKENS = "rollout/tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFigures:
    """One incident: `seconds` from its beginning to its end, None where that is not known."""

    cause: str
    is_mended: bool
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's figures, over all attempts and of the steps that stand. None: there is nothing to take it from.

    `reward_first` and `reward_last` are means over 10 steps, `tokens_per_s` is of the time spent in rollouts,
    `step_s` the median. `shares` are parts of the time of all steps by their `timeperf/` keys without `_s`, rollout
    and train first, then `other`, which is the rest, then what of the rest is known. Rollouts and rejected batches
    are counted over everything that was tried.
    """

    word: TerminalStatus
    reason: str
    steps: int
    steps_taken_back: int
    reward_first: float | None
    reward_last: float | None
    evals: tuple[EvalReport, ...]
    tokens_per_s: float | None
    step_s: float | None
    shares: tuple[tuple[str, float], ...]
    rollouts_failed: int
    rollouts_retried: int
    batches_rejected: int
    incidents: tuple[IncidentFigures, ...]
    checkpoints: int
    newest_checkpoint: str
    next_command: str


def summarize(records: RunRecords, outcome: RunOutcome, store: CheckpointStore) -> Summary:
    """The summary of a run that ended with `outcome`, from what it wrote."""
    rewards = [step.reward for step in records.steps if math.isfinite(step.reward)]
    seconds = _column(records.steps, STEP_SECONDS)
    checkpoints = [checkpoint for checkpoint in store.list() if checkpoint.state is CheckpointState.COMMITTED]
    return Summary(
        word=outcome.status,
        reason=outcome.reason,
        steps=len(records.steps),
        steps_taken_back=len(records.taken_back),
        reward_first=fmean(rewards[:MEAN_OVER_STEPS]) if rewards else None,
        reward_last=fmean(rewards[-MEAN_OVER_STEPS:]) if rewards else None,
        evals=records.evals or tuple(outcome.evals),
        tokens_per_s=_ratio(sum(_column(records.steps, TOKENS)), sum(_column(records.steps, ROLLOUT))),
        step_s=median(seconds) if seconds else None,
        shares=_shares(records.steps),
        rollouts_failed=records.rollouts_failed,
        rollouts_retried=records.rollouts_retried,
        batches_rejected=len(records.events_named("batch.rejected")),
        incidents=_incidents(records),
        checkpoints=len(checkpoints),
        newest_checkpoint=str(checkpoints[-1]) if checkpoints else "",
        next_command=outcome.next_command,
    )


def _incidents(records: RunRecords) -> tuple[IncidentFigures, ...]:
    """Each that began, by number; one whose end is not in the journal was not mended."""
    ends = {event.facts.get("incident"): event.facts for event in records.events_named("incident.ended")}
    figures = []
    for began in records.events_named("incident.began"):
        end = ends.get(began.facts.get("incident"), {})
        seconds = end.get("seconds")
        figures.append(
            IncidentFigures(
                cause=str(began.facts.get("cause")),
                is_mended=end.get("is_mended") is True,
                seconds=float(seconds) if isinstance(seconds, int | float) else None,
            )
        )
    return tuple(figures)


def _column(steps: Sequence[StepFigures], key: str) -> list[float]:
    values = (step.figures.get(key, math.nan) for step in steps)
    return [value for value in values if math.isfinite(value)]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _shares(steps: Sequence[StepFigures]) -> tuple[tuple[str, float], ...]:
    seconds: Counter[str] = Counter()
    for step in steps:
        seconds.update({key: value for key, value in step.figures.items() if math.isfinite(value)})
    total = seconds.pop(STEP_SECONDS, 0.0)
    if total <= 0:
        return ()
    known = {key: value for key, value in seconds.items() if key.startswith(KEPT_PREFIX)}
    rollout, train = known.pop(ROLLOUT, 0.0), known.pop(TRAIN, 0.0)
    first = [("rollout", rollout), ("train", train), ("other", max(total - rollout - train, 0.0))]
    rest = sorted(
        (key.removeprefix(KEPT_PREFIX).removesuffix("_s"), value) for key, value in known.items() if value > 0
    )
    return tuple((name, value / total) for name, value in [*first, *rest])


def render_summary(summary: Summary, paths: RunPaths) -> str:
    """The summary as text; only what there is something to say about has a line."""
    rows = [
        ("reward", _reward_text(summary)),
        ("held-out", _eval_text(summary.evals)),
        ("speed", _speed_text(summary)),
        ("time", _share_text(summary.shares)),
        ("rollouts", _rollout_text(summary)),
        ("incidents", _incident_text(summary.incidents)),
        ("checkpoints", _checkpoint_text(summary)),
        ("report", str(paths.report) if paths.report.exists() else ""),
        ("curve", str(paths.curve) if paths.curve.exists() else ""),
        ("files", _files_text(paths)),
        ("next", summary.next_command),
    ]
    head = _head(summary.word, paths, summary.reason)
    return "\n".join([head, "", *(f"  {label:<12}{text}" for label, text in rows if text)])


def _reward_text(summary: Summary) -> str:
    if summary.reward_first is None or summary.reward_last is None:
        return "no step was committed"
    back = f"; {summary.steps_taken_back} more were taken back" if summary.steps_taken_back else ""
    return (
        f"{summary.reward_first:.3f} (first {MEAN_OVER_STEPS} steps) → {summary.reward_last:.3f} "
        f"(last {MEAN_OVER_STEPS} of {summary.steps}{back})"
    )


def _eval_text(evals: Sequence[EvalReport]) -> str:
    if not evals:
        return ""
    first, last = evals[0], evals[-1]
    sampled, greedy = _before_after(first.sampled, last.sampled), _before_after(first.greedy, last.greedy)
    versions = f"version {first.policy_version} → {last.policy_version}"
    return f"sampled {sampled}   greedy {greedy}   ({last.prompts} problems, {versions})"


def _before_after(before: float, after: float) -> str:
    return f"{before:.3f} → {after:.3f} ({after - before:+.3f})"


def _speed_text(summary: Summary) -> str:
    tokens = "" if summary.tokens_per_s is None else f"{summary.tokens_per_s:,.0f} tokens/s in rollouts"
    step = "" if summary.step_s is None else f"{duration(summary.step_s)} for a step"
    return "   ".join(filter(None, (tokens, step)))


def _share_text(shares: Sequence[tuple[str, float]]) -> str:
    if not shares:
        return ""
    main, known = shares[:3], shares[3:]
    inside = ", ".join(f"{name} {share:.1%}" for name, share in known)
    return "   ".join(f"{name} {share:.1%}" for name, share in main) + (f" ({inside})" if inside else "")


def _rollout_text(summary: Summary) -> str:
    return (
        f"{summary.rollouts_failed} failed   {summary.rollouts_retried} retried   "
        f"rejected batches: {summary.batches_rejected}"
    )


def _incident_text(incidents: Sequence[IncidentFigures]) -> str:
    """`3, all mended: 2 server_crash (median 11.4 s), 1 verifier_broken (9.2 s)`."""
    if not incidents:
        return ""
    mended = sum(one.is_mended for one in incidents)
    how = "all mended" if mended == len(incidents) else f"{mended} mended"
    by_cause = Counter(one.cause for one in incidents).most_common()
    return f"{len(incidents)}, {how}: " + ", ".join(_cause_text(cause, count, incidents) for cause, count in by_cause)


def _cause_text(cause: str, count: int, incidents: Sequence[IncidentFigures]) -> str:
    took = [one.seconds for one in incidents if one.cause == cause and one.is_mended and one.seconds is not None]
    if not took:
        return f"{count} {cause}"
    return f"{count} {cause} ({'median ' if len(took) > 1 else ''}{median(took):.1f} s)"


def _checkpoint_text(summary: Summary) -> str:
    return f"{summary.checkpoints}, newest {summary.newest_checkpoint}" if summary.checkpoints else "none"


def _files_text(paths: RunPaths) -> str:
    known = (paths.metrics, paths.ledger, paths.events, paths.config, paths.trainer_log)
    names = [path.name for path in (*known, *sorted(paths.logs.glob("llm_server-*.log"))) if path.exists()]
    return f"{paths.logs}: {' '.join(names)}" if names else str(paths.logs)


def write_summary(paths: RunPaths, outcome: RunOutcome) -> str:
    """Draw the curve, write the summary beside it, and return the summary's text.

    What can't be read, drawn or written is said in the text: a picture that fails must not turn a run that FINISHED
    into one that did not.
    """
    try:
        records = read_records(paths)
        summary = summarize(records, outcome, CheckpointStore(paths.default_checkpoints))
    except LauncherError as error:
        return f"{_head(outcome.status, paths, outcome.reason)}\n\n  {error.message}\n  {outcome.next_command}".rstrip()
    missing = ""
    try:
        draw_curve(curve_of(records, title=_title(paths), subtitle=_subtitle(summary)), paths.curve)
        replace_file(paths.summary, (render_summary(summary, paths) + "\n").encode())
    except JournalError as error:
        missing = f"\n  {error.message}"
    except OSError as error:
        missing = f"\n  {paths.summary} was not written: {error}"
    return render_summary(summary, paths) + missing


def _head(word: TerminalStatus, paths: RunPaths, reason: str) -> str:
    return f"{word}  {_title(paths)}: {reason}"


def _title(paths: RunPaths) -> str:
    return f"{paths.experiment_name} / {paths.trial_name}"


def _subtitle(summary: Summary) -> str:
    learned = ""
    if summary.reward_first is not None and summary.reward_last is not None:
        learned = f" · reward {summary.reward_first:.2f} → {summary.reward_last:.2f}"
    return f"{summary.word} · {summary.steps} steps{learned}"
