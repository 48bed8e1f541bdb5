"""Applies settings that a repair has changed to the configuration: `sglang.mem_fraction_static` = 0.7 and the like."""

from __future__ import annotations

import copy

from launcher.base.messages import Overrides
from launcher.config.schema import RunConfig


def with_overrides(config: RunConfig, overrides: Overrides) -> RunConfig:
    """A copy of `config` with each dotted key set."""
    changed = copy.deepcopy(config)
    for key, value in overrides.items():
        *parts, name = key.split(".")
        section: object = changed
        for part in parts:
            section = getattr(section, part)
        if not hasattr(section, name):
            raise KeyError(key)
        setattr(section, name, value)
    return changed
