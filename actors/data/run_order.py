"""The order of the prompts of a run that there is, from the settings that it wrote down and its data set as it is now.

For an audit of the ledger: nothing is downloaded, and no tokenizer is loaded, so records that the trainer left out for
their length are in it. Whether it is the run's order, the fingerprint in its checkpoints shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from actors.data.dataset import load_records
from launcher.base.errors import DataError
from launcher.base.prompt_order import Circle, PromptOrder, weighted_ids
from launcher.config.data import DatasetConfig
from launcher.reporting.queue_state import read_queue_state
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import read_settings, setting_of, settings_of_attempts


def read_prompt_order(paths: RunPaths) -> PromptOrder | str:
    """Or why it is not known. Attempts may have settings of their own: those of the newest checkpoint's data count,
    else the newest ones whose data set is here."""
    files = [file for _, file in sorted(settings_of_attempts(paths.config).items(), reverse=True)] + [paths.config]
    queue = read_queue_state(paths, None)
    found = [_order_by(file) for file in files]
    orders = [one for one in found if isinstance(one, PromptOrder)]
    same = (one for one in orders if not isinstance(queue, str) and one.fingerprint == queue.fingerprint)
    return next(same, orders[0] if orders else found[0])


def _order_by(config: Path) -> PromptOrder | str:
    settings = read_settings(config)
    seed, further = setting_of(settings, "seed"), setting_of(settings, "train_datasets")
    named = {f"train_datasets.{name}": one for name, one in further.items()} if isinstance(further, Mapping) else {}
    try:
        datasets = {key: _dataset(one) for key, one in {"train_dataset": settings["train_dataset"], **named}.items()}
    except (KeyError, TypeError):
        return f"{config} does not have the run's data set"
    if not isinstance(seed, int):
        return f"{config} does not have the run's seed"
    ids: list[str] = []
    circles: list[Circle] = []
    for key, dataset in datasets.items():
        if not Path(str(dataset.path)).expanduser().exists():
            return f"{key}.path={dataset.path} is not on this machine"
        try:
            records = load_records(dataset, key=key)
        except DataError as error:
            return error.message
        weighted, circle = weighted_ids([one.id for one in records], dataset.weight)
        ids += weighted
        circles += [] if circle is None else [circle]
    return PromptOrder(ids, seed=seed, shuffle=datasets["train_dataset"].shuffle, circles=circles)


def _dataset(settings: object) -> DatasetConfig:
    """Raises TypeError where these are no settings of a data set."""
    if not isinstance(settings, Mapping):
        raise TypeError(settings)
    known = {field.name for field in dataclasses.fields(DatasetConfig)}
    return DatasetConfig(**{name: value for name, value in settings.items() if name in known})
