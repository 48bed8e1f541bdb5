"""The servers of the fleet: those that the run began with and those that joined, without those that left.

Read from the journal, so that a Coordinator that was killed is replaced by one that knows the same. A name is never
given twice in a run's attempt: the log, the port and the past of a server are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.config.schema import RunConfig

JOIN_ASKED = "server.join_asked"
JOINING = "server.joining"
LEAVE_ASKED = "server.leave_asked"
LEFT = "server.left"


def server_names(config: RunConfig) -> list[str]:
    """Those that a run begins with."""
    return [f"server-{index}" for index in range(config.sglang.n_servers)]


def index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


class FleetRecord:
    """`joining`: to join, in that order; `leaving`: asked to leave and not gone yet, each with the reason;
    `newcomers`: those of the former that have not served yet."""

    def __init__(self) -> None:
        self.joining: list[str] = []
        self.newcomers: set[str] = set()
        self.leaving: dict[str, str] = {}
        self.left: set[str] = set()

    def take(self, event: Mapping[str, object]) -> None:
        subject = str(event.get("subject", ""))
        match event.get("event"):
            case "server.join_asked":
                self.joining.append(subject)
                self.newcomers.add(subject)
            case "server.ready":
                self.newcomers.discard(subject)
            case "server.leave_asked":
                self.leaving[subject] = str(event.get("reason", ""))
            case "server.left":
                self.leaving.pop(subject, None)
                self.left.add(subject)
                self.newcomers.discard(subject)

    def members(self, first: Sequence[str]) -> list[str]:
        """All that have not left; `first` are those that the run began with."""
        return [name for name in (*first, *self.joining) if name not in self.left]

    def staying(self, first: Sequence[str]) -> list[str]:
        return [name for name in self.members(first) if name not in self.leaving]

    def next_name(self, first: Sequence[str]) -> str:
        return f"server-{1 + max(map(index_of, (*first, *self.joining)))}"
