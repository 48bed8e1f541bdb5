"""How each attempt of a run was started, as its `run.started` says: by which command, and on a clock of which zone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from launcher.base.utc_offsets import Offsets
from launcher.run_files.journal import Record
from launcher.run_log.line_values import as_float, as_integer, as_unix_time

DAY_S = 86_400
"""No zone is that far from UTC: what is, is damage, and no date could be shown in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`began_at`: unix seconds, 0 where they are not known. `utc_offsets`: from when on, and by how many seconds."""

    attempt: int
    began_at: float
    command: str
    folder: str
    utc_offsets: Offsets

    @classmethod
    def of(cls, event: Record) -> Self:
        command, given = event.get("command"), event.get("utc_offsets")
        pairs = [one for one in given if isinstance(one, list) and len(one) == 2] if isinstance(given, list) else []
        known = [(as_float(at), as_integer(offset)) for at, offset in pairs if not math.isnan(as_float(at))]
        return cls(
            attempt=as_integer(event.get("attempt")) or 0,
            began_at=as_unix_time(event.get("time")),
            command=command if isinstance(command, str) else "",
            folder=str(event.get("folder") or ""),
            utc_offsets=tuple((at, offset) for at, offset in known if offset is not None and abs(offset) < DAY_S),
        )


def offsets_of(launches: Iterable[Launch]) -> Offsets:
    """The zone of the run, as its attempts wrote it down: each until the next begins."""
    found: list[tuple[float, int]] = []
    for one in launches:
        if one.began_at and one.utc_offsets:
            found = [earlier for earlier in found if earlier[0] < one.began_at]
            found += [(max(at, one.began_at), offset) for at, offset in one.utc_offsets]
    return tuple(found)
