"""Keeps a few completions of each step in samples.jsonl, for a person to read: prompt, text, reward, who made it.

Of ASCII alone, so that no text of a model commands a terminal. Never stops a step: what a disk refuses is left out.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence

from actors.training.rejections import LONGEST_TEXT
from launcher.base.messages import StepReport
from launcher.base.rollouts import RolloutBatch
from launcher.config.reporting import StatsLoggerConfig
from launcher.run_files.run_paths import RunPaths

MIB = 2**20

log = logging.getLogger("trainer")


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
