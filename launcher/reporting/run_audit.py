"""What of a run's files its ledger is audited against: its metrics, events, checkpoint and settings.

A run without a final status may be going on. Its ledger is read before its metrics and its checkpoints, so what is one
step ahead of the ledger may be being written at this moment. What is further ahead is not; nor is anything of a run
whose driver is gone. A run that was killed, ABORTED or ERRORED may have ended between the two lines of its last step:
only FINISHED says that both were written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launcher.base.prompt_order import PromptOrder
from launcher.reporting.ledger_audit import Audit, QueueState, audit
from launcher.reporting.run_reader import RunData
from launcher.run_files.journal import Record, current_lines
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of, settings_of_attempts
from launcher.run_log.step_line import DISTANCE

QueueReader = Callable[[int | None], QueueState | str]
"""The queue in the newest checkpoint, of that step or an earlier one; or why it is not known."""
FINISHED = "FINISHED"


def audit_of(
    data: RunData,
    *,
    word: str,
    staleness: int | None,
    staleness_of: Mapping[int, int | None],
    read_queue: QueueReader,
    order: PromptOrder | str,
    is_live: bool | None,
) -> Audit | None:
    """None where there is nothing to audit, or nothing says how many prompts an epoch has. `word`: the final status, ""
    while there is none. `is_live`: whether the driver is there, None where that is not known."""
    prompts = data.log.prompts or (len(order) if isinstance(order, PromptOrder) else 0)
    if not prompts or not (data.ledger or data.log.steps):
        return None
    ledger: Sequence[Record] = data.ledger
    metrics: list[Record] = [
        {"global_step": one.step, "epoch": one.epoch, "attempt": one.attempt, "time": one.time, DISTANCE: one.distance}
        for one in data.log.steps
    ]
    queue, not_known = read_queue(None), []
    if not word and is_live is not False:
        end = _end(ledger)
        elsewhere = max(_end(current_lines(metrics)), -1 if isinstance(queue, str) else queue.step)
        if elsewhere > end + 1:
            not_known.append(
                "whether the run still writes or steps are missing: "
                f"the ledger ends with step {end}, and step {elsewhere} is written elsewhere"
            )
        ledger = _without_a_half_written_step(ledger, metrics)
        end = _end(ledger)
        metrics = [line for line in metrics if _step(line) <= end]
        queue = queue if isinstance(queue, str) or queue.step <= end else read_queue(end)
    elif word != FINISHED and len(_without_a_half_written_step(ledger, metrics)) < len(ledger):
        # ended between a step's two lines, by a kill or with its own word: the ledger's is the commit, nothing is lost
        metrics.append({"global_step": _end(ledger)})
    restores = data.log.restored_steps()
    if not restores and len(current_lines(ledger)) < len(ledger):
        not_known.append("whether steps that the ledger has again were taken again: no restore is recorded at all")
    found = audit(
        ledger,
        metrics,
        prompts=prompts,
        staleness=staleness,
        staleness_of=staleness_of,
        total_steps=_total_steps(data, word, ledger),
        restores=restores or None,
        queue=queue,
        order=order,
    )
    return replace(found, not_known=(*not_known, *found.not_known))


def bounds_of_staleness(paths: RunPaths) -> tuple[int | None, dict[int, int | None]]:
    """Versions that a token may be behind: as the run began, and in attempts with settings of their own. None where
    they can't be read."""
    of_attempts = {n: _bound(read_settings(file)) for n, file in settings_of_attempts(paths.config).items()}
    return _bound(read_settings(paths.config)), of_attempts


def _bound(settings: Mapping[str, object]) -> int | None:
    value = setting_of(settings, "rollout.max_head_offpolicyness")
    return value if isinstance(value, int) else None


def _total_steps(data: RunData, word: str, ledger: Sequence[Record]) -> int | None:
    if word != FINISHED:
        return None
    leaves_out = any(line.get("filtered_ids") for line in ledger)
    return data.log.total_steps() if leaves_out else data.log.planned_steps


def _without_a_half_written_step(ledger: Sequence[Record], metrics: Sequence[Record]) -> Sequence[Record]:
    """The last line, where it is of the next step and has no metrics yet."""
    known = {_step(line) for line in metrics}
    is_half = bool(ledger) and _step(ledger[-1]) not in known and _step(ledger[-1]) <= max(known, default=-1) + 1
    return ledger[:-1] if is_half else ledger


def _end(lines: Sequence[Record]) -> int:
    return _step(lines[-1]) if lines else -1


def _step(line: Record) -> int:
    step = line["global_step"]
    return step if isinstance(step, int) else -1
