"""The fleet's part of a plan: what is missing of the servers that there are to be is started, what is too many leaves.

A server leaves only while another one serves: its requests need a place. From then on it is neither restarted nor sent
weights, and no failure of it is counted.
"""

from __future__ import annotations

from launcher.base.messages import ServerState
from launcher.policy.actions import LeaveServer, RestartServer
from launcher.policy.plan_builder import PlanBuilder
from launcher.policy.reconcile_servers import is_current, is_dead


def reconcile_fleet(builder: PlanBuilder) -> None:
    seen = builder.seen
    there = {server.name for server in seen.servers}
    for name in seen.fleet or ():
        if name not in there:
            builder.order(RestartServer(name=name, reason=f"there are to be {len(seen.fleet or ())} servers"))
    for server in seen.servers:
        if seen.stays(server.name):
            continue
        if is_dead(server) or _another_serves(builder):
            builder.order(LeaveServer(name=server.name, reason=f"there are to be {len(seen.fleet or ())} servers"))
        else:
            builder.reasons.append(f"{server.name} leaves when another one serves")


def _another_serves(builder: PlanBuilder) -> bool:
    seen = builder.seen
    return any(
        server.state is ServerState.READY
        and not is_dead(server)
        and (is_current(server, seen.trainer) or seen.trainer.is_publishing)
        for server in seen.servers
        if seen.stays(server.name)
    )
