"""Asks the user's own command whether the reward function of another project's trainer scores known answers as it
should (`trainer.reward_check`). It runs where the trainer runs: the function may not be importable anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from actors.foreign.foreign_process import said_since, start
from actors.serving.server_log_tail import size_of
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
    variables: Mapping[str, str],
) -> str:
    """Why the reward function does not pass; "" where it does, where nothing checks it, or once `asked` is set.

    `variables`: what the trainer is given beside its own.
    """
    if (words := reward_check(config.trainer)) is None or asked.is_set():
        return ""
    command = replace(adapter.command(None), words=words, removes=(), writes={})
    limit_s, at = config.reward.setup_timeout, size_of(paths.trainer_log)
    try:  # a start that was cancelled would leave what it has started
        process = await start(command, paths, variables, stop_s=1.0)
    except ServerError as error:
        return f"{KEY} could not be run: {error.message}"
    waits = (asyncio.create_task(process.wait_ended()), asyncio.create_task(asked.wait()))
    try:
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        ended = process.ended
    finally:
        for wait in waits:
            wait.cancel()
        await process.end()
    if asked.is_set():
        return ""
    if ended is None:
        return f"{KEY} did not end within reward.setup_timeout={limit_s:g}"
    said = await said_since(paths, at) or "it printed nothing"
    return "" if ended.exit_code == 0 else f"{KEY} ended with exit code {ended.exit_code}: {said}"
