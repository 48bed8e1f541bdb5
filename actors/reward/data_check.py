"""Reads the data and scores one answer before anything is started."""

from __future__ import annotations

from actors.data.dataset import load_records
from actors.reward.reward_pool import RewardPool
from launcher.config.schema import RunConfig


def check_data(config: RunConfig) -> None:
    """Read every record, and score one answer: whatever is wrong with them costs seconds now and a cluster later."""
    records = load_records(config.train_dataset, key="train_dataset")
    if config.valid_dataset is not None:
        load_records(config.valid_dataset, key="valid_dataset")
    with RewardPool(config.reward) as pool:
        pool.check(records[0])
