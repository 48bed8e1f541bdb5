"""What a check found, in the one form that all of them have: of the settings, of a machine, of a run."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.base.errors import ResourceError


class Severity(enum.StrEnum):
    """How much a finding stops, as a word of a message.

    ABSENT: nothing is there that could be ill. UNKNOWN: it could not be seen; that stops nothing, and nothing is well
    by it. SEVERAL: only where a server or the trainer is on several GPUs; SHARED: where two processes share one. BAD
    stops all.
    """

    OK = "ok"
    NOTE = "note"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    SEVERAL = "runs with several GPUs"
    SHARED = "runs that share a GPU"
    GPU = "runs on a GPU"
    BAD = "bad"

    @property
    def stops(self) -> bool:
        """Whether it keeps anything from going on."""
        return self in (Severity.SEVERAL, Severity.SHARED, Severity.GPU, Severity.BAD)


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject`: what it is about, with the value that was found; `hint`: what to do, "" where nothing has to be;
    `facts`: the figures of the text, for machines."""

    subject: str
    text: str
    level: Severity = Severity.OK
    hint: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" if self.text else self.subject

    @property
    def stops(self) -> bool:
        return self.level.stops

    def error(self) -> ResourceError:
        return ResourceError(str(self), self.hint)
