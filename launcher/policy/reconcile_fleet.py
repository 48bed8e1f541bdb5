"""The fleet's part of a plan: whoever was asked to join joins, whoever was asked to leave leaves.

A server leaves only while another one serves: its work has to go somewhere. It is neither restarted nor sent weights
any more, and no failure of it counts against anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launcher.base.messages import ServerState
from launcher.policy.actions import JoinServer, LeaveServer
from launcher.policy.plan_builder import PlanBuilder
from launcher.policy.reconcile_servers import is_current, is_dead


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """`joins`: how many more are to join, before those of `leaves` leave."""

    joins: int
    leaves: tuple[str, ...]


def change_to(servers: int, staying: Sequence[str], *, without: Collection[str] = ()) -> FleetChange:
    """From the fleet of those `staying` to `servers` of them, not counting those `without`; the newest leave first."""
    kept = [name for name in staying if name not in without]
    surplus = kept[servers:]
    leaves = tuple(name for name in staying if name in without or name in surplus)
    return FleetChange(joins=max(0, servers - len(kept)), leaves=leaves)


def mend_fleet(draft: PlanBuilder) -> None:
    seen = draft.seen
    known = {server.name: server for server in seen.servers}
    for name in seen.joining:
        if name not in known and name not in seen.leaving:
            draft.order(JoinServer(name=name), reason=f"{name} joins")
    for name, reason in seen.leaving.items():
        server = known.get(name)
        if server is None or is_dead(server) or _another_serves(draft):
            draft.order(LeaveServer(name=name, reason=reason))
        else:
            draft.reasons.append(f"{name} leaves when another one serves")


def _another_serves(draft: PlanBuilder) -> bool:
    seen = draft.seen
    return any(
        server.state is ServerState.READY
        and not is_dead(server)
        and (is_current(server, seen.trainer) or seen.trainer.is_publishing)
        for server in seen.servers
        if server.name not in seen.leaving
    )
