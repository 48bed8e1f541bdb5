"""Asks the user's own command whether the reward function of another project's trainer scores known answers as it
should (`trainer.reward_check`). It runs where the trainer runs: the function may not be importable anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from actors.foreign.foreign_process import run_to_end
from launcher.adapters.command_adapter import reward_check
from launcher.adapters.trainer_adapter import TrainerAdapter
from launcher.base.errors import ServerError
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths

KEY = "trainer.reward_check"


async def why_broken(
    config: RunConfig,
    paths: RunPaths,
    adapter: TrainerAdapter,
    asked: asyncio.Event,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Why the reward function does not pass; "" where it does, where nothing checks it, or once `asked` is set.

    `variables`: what the trainer is given beside its own."""
    if (words := reward_check(config.trainer)) is None:
        return ""
    command = replace(adapter.command(None), words=words, removes=(), writes={})
    tasks = (asyncio.create_task(run_to_end(command, paths, variables)), asyncio.create_task(asked.wait()))
    limit_s = config.reward.setup_timeout
    try:
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if asked.is_set():
            return ""
        if not tasks[0].done():
            return f"{KEY} did not end within reward.setup_timeout={limit_s:g}"
        exit_code, said = tasks[0].result()
    except ServerError as error:
        return f"{KEY} could not be run: {error.message}"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return "" if exit_code == 0 else f"{KEY} ended with exit code {exit_code}: {said or 'it printed nothing'}"
