"""What a committed step leaves in the run's files: a line in the ledger and one in the metrics, and a few of its
completions in samples.jsonl for a person to read: prompt, text, reward, who made it.

Samples are of ASCII alone, so that no text of a model commands a terminal. They never stop a step: what a disk refuses
is left out."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from actors.cluster.fencing import wait_for_lease
from actors.training.rejections import LONGEST_TEXT
from launcher.base.disk_faults import OF_A_FILE, Refusal
from launcher.base.durable import refusal_of
from launcher.base.messages import StepReport
from launcher.base.rollouts import RolloutBatch
from launcher.config.reporting import StatsLoggerConfig
from launcher.run_files.journal import LineLog, current_line, read_lines
from launcher.run_files.run_paths import RunPaths

CUT_SHARE = 0.95
"""Of the first step's completions. Below, some end by themselves, so that the model has an end that servers know."""

MIB = 2**20

OF_A_STEP = ("global_step", "attempt", "time")
"""What no two steps of a run share, whatever was undone between them."""

log = logging.getLogger("trainer")


class StepRecords:
    def __init__(self, paths: RunPaths) -> None:
        self._ledger = LineLog(paths.ledger, durable=True)
        self._metrics = LineLog(paths.metrics)

    def write(self, report: StepReport) -> Refusal | None:
        """What refused a line, if something did; it waits in memory then."""
        wait_for_lease()
        self._ledger.append(report.ledger_line())
        self._metrics.append(report.metrics_line())
        self._tell(report)
        return self.refusal()

    def refusal(self) -> Refusal | None:
        """Writes the lines that wait; what refuses one, None where none waits any more."""
        for lines in (self._ledger, self._metrics):
            if not lines.flush() and (fault := lines.fault) is not None:
                file = str(lines.path) if fault in OF_A_FILE else ""
                return refusal_of(lines.path.parent, fault, file=file)
        return None

    def complete(self, report: StepReport) -> None:
        """Write the lines of the last step that are missing because of a kill, or of a disk that refused them: its
        state came first. Not those of a step that was undone since, and to which a person has gone back."""
        line = report.metrics_line()
        if not _stands(self._metrics.path, line, OF_A_STEP):
            if any(_is_same(known, line, OF_A_STEP) for known in read_lines(self._metrics.path)):
                return
            self._metrics.append(line)
        ledger_line = report.ledger_line()
        if not _stands(self._ledger.path, ledger_line, tuple(ledger_line)):
            self._ledger.append(ledger_line)
            self._tell(report)

    def _tell(self, report: StepReport) -> None:
        log.info(
            "step %d: reward %.3f, policy_version %d (Train step %d)",  # as AReaL counts: people look for it
            report.global_step,
            report.metrics["rollout/reward"],
            report.policy_version,
            report.global_step + 1,
        )


def _stands(path: Path, line: Mapping[str, object], keys: tuple[str, ...]) -> bool:
    """Whether this is the valid line of its step: before a restore, another branch of the run wrote one too."""
    known = current_line(path, cast(int, line["global_step"]))
    return known is not None and _is_same(known, line, keys)


def _is_same(known: Mapping[str, object], line: Mapping[str, object], keys: tuple[str, ...]) -> bool:
    return all(known.get(key) == line[key] for key in keys)


class SampleLog:
    """`decode` turns token ids into texts, special tokens included."""

    def __init__(
        self, paths: RunPaths, config: StatsLoggerConfig, decode: Callable[[Sequence[Sequence[int]]], Sequence[str]]
    ) -> None:
        self._path = paths.samples
        self._count = config.samples
        self._most_bytes = int(config.samples_mib * MIB / 2)  # in each of two files
        self._decode = decode
        self._is_refused = False

    def keep(self, report: StepReport, batch: RolloutBatch) -> None:
        """Some of a committed step, one prompt's first, as the answers to one prompt can be compared. The step's number
        draws them, so they are neither the best nor the worst."""
        draw = random.Random(report.global_step)
        groups = draw.sample(batch.groups, len(batch.groups))
        every = [(one.prompt, rollout) for one in groups for rollout in draw.sample(one.rollouts, len(one.rollouts))]
        chosen = every[: self._count]
        begun = [one.segments[0].prompt if one.segments else prompt.token_ids for prompt, one in chosen]
        prompts = self._decode(begun) if chosen else []
        lines = [
            {
                "global_step": report.global_step,
                "attempt": report.attempt,
                "time": report.time,
                "prompt_id": prompt.id,
                "prompt": text[-LONGEST_TEXT:],
                "completion": rollout.text[:LONGEST_TEXT],
                "tokens": len(rollout.completion.token_ids),
                "finish_reason": rollout.completion.finish_reason,
                "reward": rollout.reward,
                "parts": dict(rollout.parts),
                "weight_version": rollout.completion.weight_version,
                "server": rollout.completion.server,
            }
            for text, (prompt, rollout) in zip(prompts, chosen, strict=True)
        ]
        self._append("".join(json.dumps(line).replace("\x7f", "\\u007f") + "\n" for line in lines).encode("ascii"))

    def _append(self, data: bytes) -> None:
        if not data:
            return
        try:
            with self._path.open("ab") as file:
                size = file.tell()
                if size + len(data) > self._most_bytes and size:
                    self._path.replace(self._path.with_name("samples.1.jsonl"))
                    self._path.write_bytes(data)
                else:
                    file.write(data)
            self._is_refused = False
        except OSError as error:
            if not self._is_refused:
                log.warning("samples.not_kept path=%s reason=%r", self._path, error)
            self._is_refused = True


def cut_reason(metrics: Mapping[str, float], limit: int) -> str:
    """Why the first completions look as if nothing ended them; "" where most ended by themselves."""
    share = metrics.get("grpo_actor/no_eos_ratios/avg", 0.0)
    if share < CUT_SHARE:
        return ""
    return (
        f"{share:.0%} of the first step's completions were cut at gconfig.max_new_tokens={limit}: it is too short for "
        "an answer, or the model writes an end token that servers don't stop at (dry_run=true compares the chat "
        "template with the model's end tokens)"
    )


def no_score_reason(batch: RolloutBatch) -> str:
    """What the reward function did to a batch's groups that had to be made again."""
    return (
        f"the reward function gave no score ({batch.no_score}); such prompts are tried again, {batch.unscored} in this "
        "step; trainer.log has each (reward.no_score)"
    )
