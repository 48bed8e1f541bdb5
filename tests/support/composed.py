"""What the command line composes. Hydra composes each preset once a process: that is most of what takes long, and what
a test adds to the preset seldom matters to it."""

import copy
import functools
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.config import compose
from launcher.config.schema import RunConfig


def composed(*words: str) -> RunConfig:
    """A config of the caller's own. For words that mean the same whenever they are composed. Raises ConfigError."""
    return copy.deepcopy(_composed(words, Path.cwd()))


@functools.cache
def _composed(words: tuple[str, ...], _folder: Path) -> RunConfig:
    """`_folder`: the working folder, from which a preset's relative paths count."""
    preset, *settings = words
    is_shipped = preset.removeprefix("conf=") in compose.presets()
    if not is_shipped or any(word.startswith(("conf=", "hardware=", "hydra.", "~")) for word in settings):
        return compose.compose(words)
    found = copy.deepcopy(_preset(preset))
    try:
        for one in OverridesParser.create().parse_overrides(compose.as_hydra_takes(settings)):  # as Hydra does it
            OmegaConf.update(
                found, one.key_or_group, one.value(), merge=True, force_add=one.is_add() or one.is_force_add()
            )
    except (HydraException, OmegaConfBaseException):
        return compose.compose(words)  # with the message that a user reads
    return compose.to_run_config(found, words)


@functools.cache
def _preset(preset: str) -> DictConfig:
    """Not yet resolved."""
    compose.register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(compose.CONFIG_FOLDER)):
        return hydra.compose(compose.CONFIG_NAME, overrides=[preset])
