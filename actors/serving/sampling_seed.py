"""The seed with which each incarnation of a server samples."""

from __future__ import annotations

from launcher.config.schema import SGLangConfig

SEED_STRIDE = 1009
"""So that a restarted server does not draw the same samples again; larger than any number of servers."""


def sampling_seed(config: SGLangConfig, index: int, generation: int) -> int:
    """SGLang's `--random-seed` for server `index` after `generation` restarts. By default it starts from `seed`."""
    return config.random_seed + index + SEED_STRIDE * generation
