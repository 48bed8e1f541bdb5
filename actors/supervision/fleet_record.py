"""The servers that a run is to have: server-0 to server-(n - 1).

Read from the journal, so that a Coordinator that was killed is replaced by one that knows the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.config.schema import RunConfig

RESIZED = "fleet.resized"
LEFT = "server.left"


def server_names(servers: int) -> tuple[str, ...]:
    return tuple(f"server-{index}" for index in range(servers))


def index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


class FleetRecord:
    """`size`: how many servers there are to be, None: as the run began. `served`: those that have had traffic; `left`:
    those that were taken away."""

    def __init__(self) -> None:
        self.size: int | None = None
        self.served: set[str] = set()
        self.left: set[str] = set()

    def take(self, event: Mapping[str, object]) -> None:
        subject, servers = str(event.get("subject", "")), event.get("servers")
        match event.get("event"):
            case "fleet.resized" if isinstance(servers, int):
                self.size = servers
            case "server.ready":
                self.served.add(subject)
            case "server.starting":
                self.left.discard(subject)
            case "server.left":
                self.left.add(subject)
                self.served.discard(subject)

    def names(self, config: RunConfig) -> tuple[str, ...]:
        return server_names(self.size or config.sglang.n_servers)
