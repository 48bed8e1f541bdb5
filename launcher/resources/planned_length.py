"""The length of a run in steps and epochs, and the checkpoints that it keeps for good, once its prompts are counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from launcher.base.wording import counted
from launcher.config.schedule import Schedule, steps_in_all
from launcher.config.schema import RunConfig
from launcher.resources.plan_view import amount


def length_lines(
    config: RunConfig, prompts: int, *, checkpoint_bytes: int = 0, is_upper: bool = False
) -> Iterator[str]:
    """For the plan. `prompts`: of an epoch, at most so many where `is_upper`. `checkpoint_bytes`: of one checkpoint;
    0: not known."""
    size, epochs, limit = config.train_dataset.batch_size, config.total_train_epochs, config.total_train_steps
    per_epoch = -(-prompts // size)
    steps = steps_in_all(config, per_epoch)
    at_most = "at most " if is_upper or (config.actor.dynamic_sampling or 1) > 1 else ""
    last = prompts - (per_epoch - 1) * size
    rest = "" if last == size else f", the last batch of an epoch has {last}"
    passes = f"{counted(epochs, 'epoch')} of {counted(prompts, 'prompt')} by {size}"
    if steps < epochs * per_epoch:
        yield f"{at_most}{counted(steps, 'step')} (total_train_steps) of the {epochs * per_epoch:,} in {passes}{rest}"
    else:
        more = (
            "a larger total_train_epochs" if limit is None or limit > steps else "larger total_train_epochs and _steps"
        )
        yield f"{at_most}{counted(steps, 'step')}: {passes}{rest}; for more: {more}"
    yield from _kept_line(config, steps, per_epoch, checkpoint_bytes, at_most)


def _kept_line(config: RunConfig, steps: int, per_epoch: int, checkpoint_bytes: int, at_most: str) -> Iterator[str]:
    """Nothing where the saver has no interval in steps or epochs: how many there will be by the clock is not known."""
    by_count = dataclasses.replace(config.saver, freq_secs=None)
    intervals = {"saver.freq_steps": by_count.freq_steps, "saver.freq_epochs": by_count.freq_epochs}
    given = ", ".join(f"{key}={value}" for key, value in intervals.items() if value is not None)
    if not given:
        return
    schedule = Schedule(by_count, now=0.0)
    kept = sum(schedule.step_done(ended_epoch=step % per_epoch == 0, now=0.0) for step in range(1, steps + 1))
    by_clock = "" if config.saver.freq_secs is None else "; more by saver.freq_secs"
    if not kept:  # "0 checkpoints" would read as if the run saved nothing at all
        yield f"no checkpoint is kept for good: the run ends before one is due ({given}){by_clock}"
        return
    together = f", together about {amount(kept * checkpoint_bytes)}" if checkpoint_bytes else ""
    yield f"{at_most}{counted(kept, 'checkpoint')} kept for good ({given}){together}{by_clock}"
