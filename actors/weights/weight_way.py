"""Which way new weights take: the fast one, or files, which always work. Pure: no clock, no server, no tensor.

Two failures in a row of one server take files, for all. After `AGAIN_AFTER` publishes the fast way is tried again; a
failure then takes files at once, for twice as many.
"""

from __future__ import annotations

FAST_TRIES = 2
"""Failures in a row of one server, after which weights go through files."""
AGAIN_AFTER = 20
AGAIN_AT_MOST = 320
"""Publishes through files before the fast way is tried again: at first, and at most."""


class WeightWay:
    """`by_files`: the way of what is published next. `n_failures`: of the fast way, so far."""

    def __init__(self, *, by_files: bool, may_change: bool) -> None:
        self.by_files = by_files
        self.n_failures = 0
        self._may_change = may_change
        self._in_a_row: dict[str, int] = {}
        self._is_trial = False
        self._wait = self._left = AGAIN_AFTER

    def failed(self, server: str) -> bool:
        """A server did not take them by the fast way. Whether all go through files from now on."""
        if self.by_files or not self._may_change:
            return False
        self.n_failures += 1
        self._in_a_row[server] = self._in_a_row.get(server, 0) + 1
        if self._in_a_row[server] < (1 if self._is_trial else FAST_TRIES):
            return False
        self._in_a_row.clear()
        self.by_files, self._left = True, self._wait
        self._wait = min(2 * self._wait, AGAIN_AT_MOST)
        return True

    def took(self, server: str) -> bool:
        """A server took them by the fast way. Whether that is the first time since files took its place."""
        self._in_a_row.pop(server, None)
        was_trial, self._is_trial = self._is_trial and not self.by_files, False
        if was_trial:
            self._wait = AGAIN_AFTER
        return was_trial

    def published(self) -> None:
        """Once for each version."""
        if self.by_files and self._may_change:
            self._left -= 1
            if self._left == 0:
                self.by_files, self._is_trial = False, True
