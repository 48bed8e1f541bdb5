"""Reads the steps that another project's trainer reports, from where its incarnation began."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from actors.serving.server_log_tail import size_of
from launcher.adapters.trainer_adapter import StepSeen, TrainerAdapter
from launcher.policy.restore import FIRST_WEIGHTS

MOST_BYTES = 4 * 2**20


class StepSource:
    """`at_byte`: where the incarnation begins in what is read; `log_start`: in the log of its output."""

    def __init__(self, adapter: TrainerAdapter, log: Path) -> None:
        self._adapter = adapter
        self._log = log
        self._path = adapter.source or log
        self.begin()

    def begin(self, at_byte: int | None = None, *, after: int = FIRST_WEIGHTS) -> None:
        """None: with what is written from now on. `after`: the step that it resumes from."""
        self.at_byte = size_of(self._path) if at_byte is None else at_byte
        self.log_start = size_of(self._log)
        self._after = after
        self._offset = self.at_byte  # after the last byte that was read
        self._was_begun_again = False
        self._begin_text()

    def _begin_text(self) -> None:
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, *, is_over: bool = False) -> Sequence[StepSeen]:
        """All that is new. `is_over`: nothing comes any more, and the last line may lack its end. A disk may stall it:
        not for a loop that answers.

        A trainer that begins its file again as it resumes may write into it what it did before."""
        found: list[StepSeen] = []
        while text := self._new():
            found += self._take_text(text)
        if is_over:
            found += self._take_text("\n")
        if self._was_begun_again and any(one.step == self._after for one in found):
            return [one for one in found if one.step > self._after]
        return found

    def _new(self) -> str:
        """What was appended, at most MOST_BYTES of it; "" where the file is not there or can't be read now. One that is
        shorter than what was read of it was begun again."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                    self._was_begun_again = True
                    self._begin_text()
                file.seek(self._offset)
                data = file.read(MOST_BYTES)
        except OSError:
            return ""
        self._offset += len(data)
        return self._decoder.decode(data)

    def _take_text(self, text: str) -> list[StepSeen]:
        seen, self._rest = self._adapter.read(self._rest + text)
        return list(seen)
