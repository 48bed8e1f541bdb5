"""The fleet's part of a plan: servers that were asked to join or to leave do so.

A server leaves only while another one serves: its requests need a place. From the order on it is neither restarted nor
sent weights, and no failure of it is counted.
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


def reconcile_fleet(builder: PlanBuilder) -> None:
    seen = builder.seen
    known = {server.name: server for server in seen.servers}
    for name in seen.joining:
        if name not in known and name not in seen.leaving:
            builder.order(JoinServer(name=name), reason=f"{name} joins")
    for name, reason in seen.leaving.items():
        server = known.get(name)
        if server is None or is_dead(server) or _another_serves(builder):
            builder.order(LeaveServer(name=name, reason=reason))
        else:
            builder.reasons.append(f"{name} leaves when another one serves")


def _another_serves(builder: PlanBuilder) -> bool:
    seen = builder.seen
    return any(
        server.state is ServerState.READY
        and not is_dead(server)
        and (is_current(server, seen.trainer) or seen.trainer.is_publishing)
        for server in seen.servers
        if server.name not in seen.leaving
    )
