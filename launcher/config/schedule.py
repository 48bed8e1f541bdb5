"""Decides when a periodic task is due: saver, recover and evaluator (`freq_epochs|freq_steps|freq_secs`).

Pure counting; the time is an argument. Steps and epochs are counted from the start of the run, not of the attempt,
so that a run that was resumed saves after the same steps as one that was not.
"""

from __future__ import annotations

from launcher.config.schema import FreqConfig, RunConfig


def steps_in_all(config: RunConfig, per_epoch: int) -> int:
    """Of a run whose epochs have `per_epoch` steps each."""
    in_epochs = config.total_train_epochs * per_epoch
    return min(in_epochs, config.total_train_steps or in_epochs)


class Schedule:
    """One FreqConfig in use. Due when any of its intervals ends; null switches an interval off, three nulls all.

    `freq_steps=20` is due after every 20th step of the run, `freq_epochs=1` after the last step of each epoch,
    `freq_secs` when so many seconds have passed since it was last due, for whichever reason, or since the start.
    """

    def __init__(self, freq: FreqConfig, *, now: float, first_steps: int | None = None) -> None:
        """`now` is in seconds of a monotonic clock. `first_steps`: due after so many too, once."""
        self._freq = freq
        self._first_steps = first_steps
        self.restored(now=now, steps_done=0, epochs_done=0)

    def restored(self, *, now: float, steps_done: int, epochs_done: int) -> None:
        """The run was resumed or restored: so much of it is done."""
        self._steps = steps_done
        self._epochs = epochs_done
        self._last_due = now

    def step_done(self, *, ended_epoch: bool, now: float) -> bool:
        """Call once after each committed step: is it due now?"""
        self._steps += 1
        self._epochs += ended_epoch
        due = (
            self._steps == self._first_steps
            or _divides(self._freq.freq_steps, self._steps)
            or (ended_epoch and _divides(self._freq.freq_epochs, self._epochs))
            or (self._freq.freq_secs is not None and now - self._last_due >= self._freq.freq_secs)
        )
        if due:
            self._last_due = now
        return due


def _divides(interval: int | None, count: int) -> bool:
    return interval is not None and count % interval == 0
