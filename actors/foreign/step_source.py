"""Reads the steps that another project's trainer reports, from where its incarnation began."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.serving.server_log_tail import size_of
from launcher.adapters.text_tail import TextTail
from launcher.adapters.trainer_adapter import StepSeen, TrainerAdapter


class StepSource:
    """`at_byte`: where the incarnation begins in what is read; `log_start`: in the log of its output."""

    def __init__(self, adapter: TrainerAdapter, log: Path) -> None:
        self._adapter = adapter
        self._log = log
        self._path = adapter.source or log
        self.begin()

    def begin(self, at_byte: int | None = None) -> None:
        """None: with what is written from now on."""
        self.at_byte = size_of(self._path) if at_byte is None else at_byte
        self.log_start = size_of(self._log)
        self._tail, self._rest = TextTail(self._path, self.at_byte), ""

    def read(self, *, is_over: bool = False) -> Sequence[StepSeen]:
        """All that is new. `is_over`: nothing comes any more, and the last line may lack its end. A disk may stall it:
        not for a loop that answers."""
        found: list[StepSeen] = []
        while text := self._tail.read():
            found += self._take(text)
        return found + self._take("\n") if is_over else found

    def _take(self, text: str) -> list[StepSeen]:
        seen, self._rest = self._adapter.read(self._rest + text)
        return list(seen)
