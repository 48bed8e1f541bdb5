"""Under which settings memory ran out, what is remembered of it, and which settings take effect now.

An incarnation that ended is judged by the settings that it was started with. Where these have given way since, because
another server met the same end first, the next incarnation already has others and no further step is due.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from actors.supervision.run_history import RunHistory
from launcher.base.errors import StorageError
from launcher.base.messages import Overrides
from launcher.config.schema import RunConfig
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import CONCURRENCY, OF_SERVERS, Lengths, MemorySettings, TriedSettings
from launcher.policy.observed import ServerFacts
from launcher.resources.memory_history import MemoryHistory, RememberedSettings


class OomBackoff:
    """`on_gpu`, `shares_gpu`: where the servers run, and whether the trainer runs there too. `book`: None forgets."""

    def __init__(
        self,
        config: RunConfig,
        history: RunHistory,
        book: MemoryHistory | None,
        *,
        on_gpu: bool,
        shares_gpu: bool,
    ) -> None:
        self._config = config
        self._history = history
        self._book = book if config.memory.remember else None
        self._on_gpu = on_gpu
        self._shares_gpu = shares_gpu

    async def begin(self) -> None:
        """Take up what earlier attempts learnt; once in an attempt, before anything is started."""
        if self._book is None or self._history.memory.started_with:
            return
        try:
            kept = await asyncio.to_thread(self._book.read)
        except StorageError as error:
            self._history.event("memory.book_damaged", subject="memory", reason=error.message)
            return
        if kept is not None and kept.overrides:
            told = ", ".join(f"{key}={value}" for key, value in kept.overrides.items())
            how = f"to forget: delete {self._book.path}, or set memory.remember=false"
            self._history.remembered(kept, f"{told} ({how})")

    def settings(self, lengths: Lengths, overrides: Overrides | None = None) -> MemorySettings:
        """The settings in force, or as they were with `overrides`."""
        at_most = self._config.sglang.context_length or self._config.gconfig.max_new_tokens
        configured = MemorySettings.of(
            self._config,
            longest_sequence=lengths.longest_sequence or at_most,
            largest_micro_batch=lengths.largest_micro_batch,
            on_gpu=self._on_gpu,
            shares_gpu=self._shares_gpu,
        )
        return configured.changed(self._history.memory.overrides if overrides is None else overrides)

    def as_due(self, facts: ServerFacts) -> ServerFacts:
        """Without `ran_out` where the settings under which it did are no longer in force."""
        now = self._history.memory.overrides
        began_with = self._history.memory.started_with.get(facts.name, now)
        gave_way = any(began_with.get(key) != now[key] for key in OF_SERVERS & now.keys())
        return replace(facts, ran_out=None) if facts.ran_out is not None and gave_way else facts

    async def ran_out(self, subject: str, where: RanOut, lengths: Lengths, rung: Overrides) -> None:
        """Write down that `subject` did, and keep the `rung` that was taken for later attempts."""
        under = self._history.memory.started_with.get(subject, {})
        tried = TriedSettings(ran_out=where, settings=self.settings(lengths, under))
        told = ", ".join(f"{key}={value}" for key, value in rung.items()) or "nothing that could give way is left"
        self._history.ran_out(subject, tried, told)
        if self._book is None:
            return
        kept = RememberedSettings(
            overrides=dict(self._history.memory.overrides), tried=tuple(self._history.memory.tried)
        )
        try:
            by = f"{self._config.experiment_name}/{self._config.trial_name}"
            await asyncio.to_thread(self._book.keep, kept, by=by)
        except StorageError as error:
            self._history.event("memory.not_kept", subject="memory", reason=error.message)

    @property
    def concurrency(self) -> int | None:
        """The limit of rollouts in flight, where it has given way: the trainer takes it while it runs."""
        limit = self._history.memory.overrides.get(CONCURRENCY)
        return None if limit is None else int(limit)
