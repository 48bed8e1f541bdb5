"""Loads the prompts that a run trains on and is evaluated on, as token ids.

How often an epoch has the prompts of a training data set is the data set's weight. Weight 1: each once. Weight 2: each
twice, as two prompts. Weight 0.5: half of them, and the other half in the next epoch. So a weight of w means that e
epochs have each prompt w·e times, rounded up or down, whatever fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actors.data.dataset import BadRecords, DataRecord
from actors.data.prompt_queue import PromptQueue
from actors.data.prompts import ChatTokenizer, build_prompts
from launcher.base.prompt_order import Circle, share_of, weighted_ids
from launcher.base.rollouts import Prompt
from launcher.base.wording import counted
from launcher.config.data import DatasetConfig
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Prompts by id. `left_out`: records that are longer than the data set's max_length. `circles`: prompts of which an
    epoch has only some."""

    prompts: dict[str, Prompt]
    held_out: dict[str, Prompt]
    left_out: int
    max_new_tokens: int
    circles: tuple[Circle, ...] = ()

    @property
    def longest_sequence(self) -> int:
        """Prompt and completion, tokens."""
        return max(len(prompt.token_ids) for prompt in self.prompts.values()) + self.max_new_tokens

    @property
    def golden_prompt(self) -> tuple[int, ...]:
        """The prompt of the weight check; the same in every incarnation of the trainer."""
        return self.prompts[min(self.prompts)].token_ids


def record_bad(journal: Journal, bad: BadRecords, key: str) -> None:
    """The event of the records that were skipped, where some were."""
    if bad.count:
        reason = f"{counted(bad.count, 'record')} left out: {'; '.join(bad.examples)}"
        journal.record("data.left_out", subject=key, reason=reason, prompts=bad.count)


def in_epoch(weight: float, count: int) -> int:
    """So many prompts an epoch has of a data set of `count`."""
    times, rest = share_of(weight, count)
    return times * count + rest


def mixed(prompts: Sequence[Prompt], weight: float) -> tuple[list[Prompt], Circle | None]:
    """The prompts with their copies, and of which of these an epoch has only some."""
    ids, circle = weighted_ids([one.id for one in prompts], weight)
    return [replace(prompts[n % len(prompts)], id=one) for n, one in enumerate(ids)], circle


def gathered(config: RunConfig, encoded: Mapping[str, Sequence[Prompt]], *, left_out: int = 0) -> TrainingData:
    """The prompts of all data sets, given by their settings' names."""
    prompts: dict[str, Prompt] = {}
    held_out: dict[str, Prompt] = {}
    circles: list[Circle] = []
    for key, dataset in config.datasets().items():
        if key.startswith("valid"):
            held_out |= {prompt.id: prompt for prompt in encoded[key]}
            continue
        weighted, circle = mixed(encoded[key], dataset.weight)
        prompts |= {prompt.id: prompt for prompt in weighted}
        circles += [circle] if circle is not None else []
    return TrainingData(
        prompts=prompts,
        held_out=held_out,
        left_out=left_out,
        max_new_tokens=config.gconfig.max_new_tokens,
        circles=tuple(circles),
    )


def queue_of(config: RunConfig, data: TrainingData) -> PromptQueue:
    """The queue of a run that begins."""
    shuffle = config.train_dataset.shuffle
    return PromptQueue(list(data.prompts), seed=config.seed, shuffle=shuffle, circles=data.circles)


class DataLoader:
    """`context`: tokens that model and server take, None where it is not known."""

    def __init__(self, config: RunConfig, tokenizer: ChatTokenizer, context: int | None, journal: Journal) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._context = context
        self._journal = journal

    def load(self, records: Mapping[str, Sequence[DataRecord]]) -> TrainingData:
        """Of each data set by its setting. Raises DataError, ModelError, ConfigError."""
        encoded, left_out = {}, 0
        for key, dataset in self._config.datasets().items():
            encoded[key], too_long = self._encode(records[key], dataset, key)
            left_out += 0 if key.startswith("valid") else too_long
        return gathered(self._config, encoded, left_out=left_out)

    def _encode(self, records: Sequence[DataRecord], dataset: DatasetConfig, key: str) -> tuple[list[Prompt], int]:
        bad = BadRecords(dataset)
        prompts, left_out = build_prompts(
            records,
            self._tokenizer,
            max_prompt_tokens=None if self._context is None else self._context - self._config.gconfig.max_new_tokens,
            max_length=dataset.max_length,
            key=key,
            chat=self._config.chat,
            bad=bad,
        )
        record_bad(self._journal, bad, key)
        if left_out:
            self._journal.record("data.left_out", subject=key, reason=f"over {key}.max_length", prompts=left_out)
        return prompts, left_out
