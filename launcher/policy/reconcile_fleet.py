"""The fleet's part of a plan: servers that were asked to join or to leave do so.

A server leaves only while another one serves: its requests need a place. From the order on it is neither restarted nor
sent weights, and no failure of it is counted.

A standby holds every published version and takes no traffic. The server that it replaces changes places with it: the
lost one's own restart, in the background, brings the next standby. So no name, port or log is given away, and a
standby is restarted, loaded and given up by the rules of any server, on a budget of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launcher.base.messages import Health, ServerState
from launcher.policy.actions import JoinServer, LeaveServer, PromoteServer, RestartServer
from launcher.policy.observed import ServerFacts
from launcher.policy.plan_builder import PlanBuilder
from launcher.policy.reconcile_servers import active_servers, being_replaced, is_current, is_dead, trainer_has_weights
from launcher.policy.run_state import RunState

ANSWERING = frozenset({Health.HEALTHY, Health.UNKNOWN})
"""Of the HealthMonitor, which may be away; the standby is asked once more before it gets traffic."""


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
            builder.order(JoinServer(name=name, is_standby=name in seen.standbys), reason=f"{name} joins")
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


def reconcile_standbys(builder: PlanBuilder) -> None:
    """Before the servers' part: what has a standby to take its place is not restarted first."""
    seen = builder.seen
    parked = [server for server in seen.servers if server.name in seen.standbys and _may_be_promoted(builder, server)]
    as_they_are = {*seen.leaving, *being_replaced(builder)} if parked else set()
    for lost in active_servers(seen) if parked and trainer_has_weights(builder) else ():
        is_lost = is_dead(lost) or builder.does(RestartServer, lost.name)
        if is_lost and lost.name not in as_they_are and parked:
            standby = parked.pop(0)
            action = PromoteServer(name=standby.name, replaces=lost.name)
            builder.order(action, reason=f"{standby.name} takes the place of {lost.name}")
    if len(seen.standbys) < (builder.config.recovery.standby_servers or 0) and _all_serve(builder):
        builder.order(JoinServer(name=seen.next_name, is_standby=True), reason=f"{seen.next_name} is to stand by")


def _may_be_promoted(builder: PlanBuilder, standby: ServerFacts) -> bool:
    """READY is one that was promoted when its Coordinator ended."""
    return (
        standby.state in (ServerState.PARKED, ServerState.READY)
        and standby.verdict.health in ANSWERING
        and is_current(standby, builder.seen.trainer)
        and standby.name not in builder.seen.leaving
        and not builder.does(PromoteServer, standby.name)
        and not builder.rests(PromoteServer, standby.name)
    )


def _all_serve(builder: PlanBuilder) -> bool:
    """The run's own servers come first: a start takes the CPUs that the first step needs."""
    return builder.seen.state is RunState.RUNNING and all(
        server.state is ServerState.READY and not is_dead(server) for server in active_servers(builder.seen)
    )
