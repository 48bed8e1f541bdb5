"""The states of a server's incarnation and of the trainer's process, as the Coordinator orders and learns them; each
has only the data that it needs.

A server is starting ─► running ─► dead ─► starting the next incarnation; stopped and failed by order. What a running
one does now (STARTING, STALE, READY, SUSPECT) is in the answers of its actor and of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from launcher.base.messages import ServerInfo, ServerState
from launcher.policy.exit_cause import ExitFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """`generation`: its number, -1 before the first. `lineage`: of the weights that it started from, None: unknown."""

    generation: int
    lineage: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStarting(Incarnation):
    """An order to start it is under way, so that it does not run means nothing. `lost`: why its node was, "" if not."""

    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRunning(Incarnation):
    """Its start has ended. `failed_start`: with what error; `late_at`: when the start of an adopted one is given up.

    `gone_since`: its process is gone, and its host has not reported the reason yet. `was_ready`: before the publish
    that is under way.
    """

    failed_start: str = ""
    late_at: float = float("inf")
    gone_since: float | None = None
    was_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDead(Incarnation):
    """It has ended without an order, or its node was lost."""

    finding: ExitFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStopped(Incarnation):
    """Ended by order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailed(Incarnation):
    """Given up for the rest of the run."""


ServerIncarnationState = ServerStarting | ServerRunning | ServerDead | ServerStopped | ServerFailed


def state_unless_running(state: ServerStarting | ServerDead | ServerStopped | ServerFailed) -> ServerState:
    match state:
        case ServerStarting():
            return ServerState.STARTING
        case ServerDead():
            return ServerState.DEAD
        case ServerStopped():
            return ServerState.STOPPED
        case ServerFailed():
            return ServerState.FAILED
        case _ as unreachable:
            assert_never(unreachable)


def why_older(info: ServerInfo, ordered: int) -> str:
    """Why its actor answers with an older generation than was ordered; a process of it that has just begun has none."""
    if info.generation >= 0:
        has = f"generation {info.generation}, {info.state}"
        return f"generation {ordered} was ordered and never begun: its actor has {has}"
    if ordered > 0:
        return "its actor's process ended, and the server with it"
    return "its actor has begun no server: the order never reached it, or its process ended"


# ── the trainer ──


@dataclass(frozen=True, slots=True)
class ProcessId:
    """On another node the same pid is another process."""

    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class NoOrder:
    """No start is under way: what the trainer does is in its view."""


@dataclass(frozen=True, slots=True)
class StartOrdered:
    """An order to start it is under way, so that it is empty means nothing."""


@dataclass(frozen=True, slots=True)
class OrderOverdue:
    """An order was not carried out by its deadline; while it is still busy with it, or is not there, it hangs."""

    reason: str


OrderState = NoOrder | StartOrdered | OrderOverdue


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The last process of it that has ended. `finding`: why, where more is known than that it did. `told`: why it could
    not start, in its own words."""

    process: ProcessId | None = None
    finding: ExitFinding | None = None
    told: str = ""
