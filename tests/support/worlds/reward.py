"""Settings of a reward function, and one score by it."""

import asyncio
from functools import partial

from launcher.base.rollouts import Prompt
from launcher.config.schema import RewardConfig
from tests.support.machine import scaled

deadline_s = partial(scaled, 60)
"""Of a function that never answers; the others beside it answer sooner, on a busy machine too."""


PROMPT = Prompt(id="p1", token_ids=(1,), record={"question": "6*7?", "answer": "6*7=42\n#### 42", "level": 2})


def config(fn, **changes):
    return RewardConfig(**{"fn": fn, "timeout": 30.0, "setup_timeout": 60.0, "workers": 1} | changes)


def score(pool, completions, prompt=PROMPT):
    return asyncio.run(asyncio.wait_for(pool.score(completions, prompt), deadline_s()))
