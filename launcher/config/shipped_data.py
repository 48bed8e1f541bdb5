"""Which held-out data belongs to which training data, by the presets of the launcher.

Whoever trains on their own data and forgets the held-out data would be shown the rewards of somebody else's problems.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping

from launcher.base.yaml_text import load_yaml
from launcher.config.compose import CONFIG_FOLDER, REPOSITORY
from launcher.config.schema import RunConfig

BELOW_REPOSITORY = re.compile(r"\$\{repo:(.+)\}")
FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")


def foreign_held_out(config: RunConfig) -> str:
    """A note where the held-out data is a preset's and the training data is not; "" elsewhere."""
    if config.valid_dataset is None:
        return ""
    of_preset = _training_data().get(config.valid_dataset.path)
    if of_preset is None or config.train_dataset.path in of_preset:
        return ""
    given = [name for name in FREQUENCIES if getattr(config.evaluator, name) is not None]
    without = " ".join(["valid_dataset=null", *(f"evaluator.{name}=null" for name in given)])
    return (
        f"valid_dataset.path={config.valid_dataset.path} is the preset's, and train_dataset.path is not: the held-out "
        f"rewards will be those of the preset's problems. Set valid_dataset.path, or {without}"
    )


@functools.cache
def _training_data() -> Mapping[str, frozenset[str]]:
    """The paths of training data, by the path of the held-out data that a preset has beside it."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in (CONFIG_FOLDER / "conf").glob("*.yaml"):
        settings = load_yaml(file.read_text())
        train, held_out = settings.get("train_dataset", {}).get("path"), settings.get("valid_dataset", {}).get("path")
        if train and held_out:
            found[_resolved(held_out)].add(_resolved(train))
    return {path: frozenset(train) for path, train in found.items()}


def _resolved(path: str) -> str:
    below = BELOW_REPOSITORY.fullmatch(path)
    return path if below is None else str(REPOSITORY / below.group(1))
