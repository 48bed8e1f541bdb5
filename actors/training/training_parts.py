"""What a trainer loads whatever step it continues from: the model with its first weights, the prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.data.dataset import DataRecord
from actors.data.mixture import in_epoch
from actors.data.training_data import DataLoader, TrainingData, record_bad
from actors.model.policy_model import PolicyModel, Ranks
from actors.reward.data_check import records_of
from actors.reward.reward_pool import RewardPool
from launcher.config.data import DatasetConfig
from launcher.config.schedule import steps_in_all
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """Loaded with `config`, and of use with the same settings only."""

    config: RunConfig
    model: PolicyModel
    data: TrainingData

    @classmethod
    def load(
        cls, config: RunConfig, journal: Journal, *, reward: RewardPool | None = None, ranks: Ranks | None = None
    ) -> TrainingParts:
        """`reward`: for data whose bad records are skipped. Raises the UsageErrors of each, and TrainerError where the
        `ranks` don't meet.
        """
        scorer = None if config.rollout.episode else reward
        records = {key: _read(dataset, key, scorer, journal) for key, dataset in config.datasets().items()}
        model = PolicyModel(
            config.actor,
            config.ref,
            temperature=config.gconfig.temperature,
            total_steps=planned_steps(config, records),
            tokenizer_path=config.tokenizer_path,
            ranks=ranks,
        )
        context = config.sglang.context_length or model.context_length
        data = DataLoader(config, model.tokenizer, context, journal).load(records)
        return cls(config=config, model=model, data=data)


def can_be_loaded_ahead(config: RunConfig) -> bool:
    """Without the reward function."""
    return not any(dataset.bad_records == "skip" for dataset in config.datasets().values())


def _read(dataset: DatasetConfig, key: str, reward: RewardPool | None, journal: Journal) -> list[DataRecord]:
    """Without those that were skipped. That the others fit was checked before anything was started."""
    records, bad = records_of(dataset, reward if dataset.bad_records == "skip" else None, key=key)
    record_bad(journal, bad, key)
    return records


def planned_steps(config: RunConfig, records: Mapping[str, Sequence[DataRecord]]) -> int:
    """Length of the learning-rate schedule, in optimizer steps."""
    training = [(one, len(records[key])) for key, one in config.datasets().items() if key.startswith("train")]
    prompts = sum(in_epoch(one.weight, count) for one, count in training)
    return steps_in_all(config, -(-prompts // config.train_dataset.batch_size))
