"""The last text of a run: its status and why, what it learned, what that cost, its files, what to do next."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from statistics import median

from launcher.base.durable import replace_file
from launcher.base.errors import LauncherError
from launcher.base.messages import RunOutcome
from launcher.base.own_python import python
from launcher.base.wording import counted
from launcher.checkpoints.checkpoint_store import CheckpointState, CheckpointStore
from launcher.reporting.formats import duration, held_out
from launcher.reporting.run_facts import RunFacts, read_facts
from launcher.reporting.run_view import MEAN_OVER_STEPS
from launcher.reporting.terminal_text import visible
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import foreign_trainer, read_settings
from launcher.run_log.incident_facts import IncidentFacts
from launcher.run_log.step_line import StepLine


def write_summary(paths: RunPaths, outcome: RunOutcome) -> str:
    """Write the summary, and return its text.

    What can't be read or written is reported in the text: it must not turn a run that FINISHED into one that did not.
    """
    try:
        facts = read_facts(paths)
        checkpoints = _checkpoint_text(paths)
    except LauncherError as error:
        return f"{_head(outcome, paths)}\n\n  {error.message}\n  {outcome.next_command}".rstrip()
    missing = ""
    try:
        replace_file(paths.summary, f"{visible(_render(facts, outcome, paths, checkpoints))}\n".encode())
    except OSError as error:
        missing = f"\n  {paths.summary} was not written: {error}"
    return _render(facts, outcome, paths, checkpoints) + missing


def _render(facts: RunFacts, outcome: RunOutcome, paths: RunPaths, checkpoints: str) -> str:
    """Only what there is something to report about has a line."""
    rows = [
        ("reward", _reward_text(facts)),
        ("held-out", held_out(facts.evals or tuple(outcome.evals))),
        ("speed", _speed_text(facts)),
        ("time", _share_text(facts.steps)),
        (
            "rollouts",
            ""
            if foreign_trainer(read_settings(paths.config))
            else f"{facts.rollouts_failed} failed   {facts.rollouts_retried} retried   "
            f"rejected batches: {facts.rejected}",
        ),
        ("incidents", _incident_text(facts.incidents)),
        ("cost", _cost_text(facts)),
        ("checkpoints", checkpoints),
        ("report", str(paths.report) if paths.report.exists() else ""),
        ("files", _files_text(paths)),
        ("watch", f"{python()} -m scripts.watch --fileroot {shlex.quote(str(paths.fileroot))}"),
        ("ledger", _ledger_command(paths) if paths.ledger.exists() else ""),
        ("next", outcome.next_command),
    ]
    return "\n".join([_head(outcome, paths), "", *(f"  {label:<12}{text}" for label, text in rows if text)])


def _ledger_command(paths: RunPaths) -> str:
    return f"{python()} -m scripts.check_ledger {shlex.quote(str(paths.logs))}"


def _head(outcome: RunOutcome, paths: RunPaths) -> str:
    return f"{outcome.status}  {paths.title}: {outcome.reason}"


def _reward_text(facts: RunFacts) -> str:
    if facts.reward_first is None:
        return "no step was committed"
    taken_back = sum(map(len, facts.taken_back))
    back = f"; {taken_back} more were undone" if taken_back else ""
    given = sum(math.isfinite(step.reward) for step in facts.steps)
    if given <= MEAN_OVER_STEPS:
        return f"{facts.reward_last:.3f} (mean of {counted(given, 'step')}{back})"
    return (
        f"{facts.reward_first:.3f} (first {MEAN_OVER_STEPS} steps) → {facts.reward_last:.3f} "
        f"(last {MEAN_OVER_STEPS} of {len(facts.steps)}{back})"
    )


def _speed_text(facts: RunFacts) -> str:
    step_s = facts.losses.usual_step_s
    tokens = "" if facts.tokens_per_s is None else f"{facts.tokens_per_s:,.0f} tokens/s in rollouts"
    return "   ".join(filter(None, (tokens, "" if step_s is None else f"{duration(step_s)} for a step")))


def _share_text(steps: Sequence[StepLine]) -> str:
    """Parts of the time of all steps: rollout, train, the rest, and in brackets what of the rest is known."""
    seconds: Counter[str] = Counter()
    for step in steps:
        seconds.update({name: value for name, value in step.seconds.items() if math.isfinite(value)})
    total = seconds.pop("step", 0.0)
    if total <= 0 or not seconds:  # of another project's trainer only the whole is known
        return ""
    rollout, train = seconds.pop("rollout", 0.0), seconds.pop("train", 0.0)
    main = {"rollout": rollout, "train": train, "other": max(total - rollout - train, 0.0)}
    known = ", ".join(f"{name} {part / total:.1%}" for name, part in sorted(seconds.items()) if part > 0)
    return "   ".join(f"{name} {part / total:.1%}" for name, part in main.items()) + (f" ({known})" if known else "")


def _incident_text(incidents: Sequence[IncidentFacts]) -> str:
    """`3, all repaired: 2 server_crash (median 11.4 s), 1 verifier_broken (9.2 s)`."""
    if not incidents:
        return ""
    mended = sum(one.is_mended is True for one in incidents)
    how = "all repaired" if mended == len(incidents) else f"{mended} repaired"
    later = sum(one.later_attempt is not None for one in incidents)
    how += f", {later} over with a later attempt" if later else ""
    by_cause = Counter(one.cause for one in incidents).most_common()
    return f"{len(incidents)}, {how}: " + ", ".join(_cause_text(cause, count, incidents) for cause, count in by_cause)


def _cause_text(cause: str, count: int, incidents: Sequence[IncidentFacts]) -> str:
    took = [one.repaired_s for one in incidents if one.cause == cause and one.repaired_s is not None]
    if not took:
        return f"{count} {cause}"
    return f"{count} {cause} ({'median ' if len(took) > 1 else ''}{median(took):.1f} s)"


def _cost_text(facts: RunFacts) -> str:
    """`faults 0.42 of 12.30 (3:07 of 1:31:07; run.price_per_hour=8.1)`."""
    if facts.cost is None:
        return ""
    of_faults, of_all = facts.cost
    times = f"{duration(facts.losses.faults_s)} of {duration(facts.losses.wall_s)}"
    price = f"run.price_per_hour={facts.price_per_hour:g}"
    return f"faults {of_faults:,.2f} of {of_all:,.2f} ({times}; {price})"


def _checkpoint_text(paths: RunPaths) -> str:
    if foreign := foreign_trainer(read_settings(paths.config)):
        return foreign
    found = CheckpointStore(paths.default_checkpoints).list()
    committed = [checkpoint for checkpoint in found if checkpoint.state is CheckpointState.COMMITTED]
    return f"{len(committed)}, newest {committed[-1]}" if committed else "none"


def _files_text(paths: RunPaths) -> str:
    known = (paths.metrics, paths.ledger, paths.events, paths.config, paths.trainer_log)
    names = [path.name for path in (*known, *sorted(paths.logs.glob("llm_server-*.log"))) if path.exists()]
    return f"{paths.logs}: {' '.join(names)}" if names else str(paths.logs)
