"""The fleet's part of a plan: whoever was asked to join joins, whoever was asked to leave leaves.

A server leaves only while another one serves: its work has to go somewhere. It is neither restarted nor sent weights
any more, and no failure of it counts against anybody.
"""

from __future__ import annotations

from launcher.messages import ServerState
from launcher.policy.actions import JoinServer, LeaveServer
from launcher.policy.mend_servers import is_current, is_dead
from launcher.policy.plan_draft import Draft


def mend_fleet(draft: Draft) -> None:
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


def _another_serves(draft: Draft) -> bool:
    seen = draft.seen
    return any(
        server.state is ServerState.READY
        and not is_dead(server)
        and (is_current(server, seen.trainer) or seen.trainer.is_publishing)
        for server in seen.servers
        if server.name not in seen.leaving
    )
