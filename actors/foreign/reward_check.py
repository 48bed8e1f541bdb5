"""Asks the user's own command whether the reward function of another project's trainer scores known answers as it
should (`trainer.reward_check`). It runs where the trainer runs: the function may not be importable anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from actors.foreign.foreign_process import said_since, start
from actors.serving.server_log_tail import size_of
from launcher.adapters.command_adapter import reward_check
from launcher.adapters.trainer_adapter import TrainerAdapter
from launcher.base.errors import ServerError
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths

KEY = "trainer.reward_check"
COULD_NOT_RUN = (126, 127)
"""A shell's exit codes for a command that can't be started. POSIX.1-2017, 2.8.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """Why the check is no pass. `is_known`: it ran to its end and failed; else nothing is known of the function."""

    why: str
    is_known: bool


async def objection(
    config: RunConfig,
    paths: RunPaths,
    adapter: TrainerAdapter,
    asked: asyncio.Event,
    variables: Mapping[str, str],
) -> Objection | None:
    """None where the reward function passes, where nothing checks it, or once `asked` is set.

    `variables`: what the trainer is given beside its own.
    """
    if (words := reward_check(config.trainer)) is None or asked.is_set():
        return None
    command = replace(adapter.command(None), words=words, removes=(), writes={})
    limit_s, at = config.reward.setup_timeout, size_of(paths.trainer_log)
    try:  # a start that was cancelled would leave what it has started
        process = await start(command, paths, variables, stop_s=1.0)
    except ServerError as error:
        return Objection(why=f"{KEY} could not be run: {error.message}", is_known=False)
    waits = (asyncio.create_task(process.wait_ended()), asyncio.create_task(asked.wait()))
    try:
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        ended = process.ended
    finally:
        for wait in waits:
            wait.cancel()
        await process.end()
    if asked.is_set() or (ended is not None and ended.exit_code == 0):
        return None
    if ended is None:
        return Objection(why=f"{KEY} did not end within reward.setup_timeout={limit_s:g}", is_known=False)
    said = await said_since(paths, at) or "it printed nothing"
    is_known = ended.exit_code is not None and ended.exit_code > 0 and ended.exit_code not in COULD_NOT_RUN
    return Objection(why=f"{KEY} ended with exit code {ended.exit_code}: {said}", is_known=is_known)
