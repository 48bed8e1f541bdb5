"""The states of the trainer's process, as the Coordinator orders and learns them."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.policy.exit_cause import ExitFinding


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
