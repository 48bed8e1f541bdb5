"""Settings whose mechanism has gone. For one version each is still accepted, and one line says that it does nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from launcher.config.settings import MISSING

RETIRED: Mapping[str, str] = {
    "actor.use_remove_padding": "sequences of like length share a micro-batch, of which 1 to 4 % is padding",
    "disk.forget_s": "a disk's trouble counts from the first that was met after the last committed step",
    "gate.older_weights": "tokens of older weights are compared with those of today (gate.distance_unknown)",
    "health.slow_factor": "how fast a server generates is not judged: nothing was done about it",
    "keep_alive": "a driver that is killed is always begun again (restart.driver)",
    "memory.warn_before_s": "the host's memory is reported once when 90 % of it is in use",
    "recovery.quarantine_gpus": "a server whose GPU fails is restarted on the same one, and given up where that fails",
    "restart.fleet": "a server is restarted by itself (restart.server), and a new attempt starts all (restart.attempt)",
    "recovery.standby_servers": "all servers serve (sglang.n_servers), and the others go on when one is lost",
}
"""Each key, and what takes its place: a sentence."""


def accept_retired(schema: Any) -> DictConfig:
    """The schema with the retired keys, so that Hydra takes them from presets and from the command line too."""
    accepting: DictConfig = OmegaConf.structured(schema)
    with open_dict(accepting):
        for key in RETIRED:
            OmegaConf.update(accepting, key, MISSING, force_add=True)
    return accepting


def drop_retired(composed: DictConfig) -> None:
    """Take them out of what was composed; those that were given are named on stderr."""
    for key in RETIRED:
        section, _, name = key.rpartition(".")
        node = OmegaConf.select(composed, section) if section else composed
        if not isinstance(node, DictConfig):
            continue  # its section was set to null
        is_given = name in node  # one that is missing is not
        if is_given:
            _report_once(key, RETIRED[key])
        if is_given or OmegaConf.is_missing(node, name):
            with open_dict(node):
                del node[name]


@functools.cache  # a sweep composes each of its trials
def _report_once(key: str, sentence: str) -> None:
    print(f"note: {key} does nothing any more: {sentence}", file=sys.stderr)
