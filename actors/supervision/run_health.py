"""What the Coordinator's last look shows of the run's health, for now.json. What nobody saw is not healthy in it."""

from __future__ import annotations

from collections.abc import Mapping

from actors.supervision.server_handle import SERVES
from launcher.base.messages import Health, Incident, Verdict
from launcher.policy.observed import Observed, ServerFacts
from launcher.reporting.current_status import RunHealth, ServerHealth

LOOK_LATE_S = 10.0
"""The Coordinator looks every second: what it saw longer ago may be over, and is not said to be so now."""
NOT_JUDGED = Verdict(health=Health.UNKNOWN, reason="the HealthMonitor has not judged it yet")
SOUND = Verdict(health=Health.HEALTHY, reason="nothing is wrong with what was judged so far")


def health_of(
    seen: Observed, *, age_s: float, reasons: Mapping[str, str], silent_s: Mapping[str, float], has_trainer: bool
) -> RunHealth | None:
    """`reasons`: why a server is in its state, by the trainer's requests; `silent_s`: for how long its actor has been
    asked in vain. None where the look is old."""
    if age_s > LOOK_LATE_S:
        return None
    unheard = _unheard(seen)
    return RunHealth(
        age_s=age_s,
        trainer=seen.trainer.verdict if has_trainer else None,
        rewards=_of_rewards(seen.incident, unheard) if has_trainer else None,
        servers=tuple(
            ServerHealth(
                name=one.name,
                state=one.state,
                verdict=_of_server(one, unheard),
                weight_version=one.weight_version,
                reason=one.stale_reason or reasons.get(one.name, ""),
                silent_s=silent_s.get(one.name, 0.0),
            )
            for one in seen.servers
        ),
    )


def _unheard(seen: Observed) -> Verdict | None:
    if seen.is_judged:
        return None
    return Verdict(
        health=Health.UNKNOWN, reason=f"the HealthMonitor has not answered for {seen.monitor_silent_s:.0f} s"
    )


def _of_rewards(incident: Incident | None, unheard: Verdict | None) -> Verdict:
    if incident is not None:
        return Verdict(health=Health.SUSPECT, reason=incident.reason, cause=incident.cause)
    return unheard or SOUND


def _of_server(server: ServerFacts, unheard: Verdict | None) -> Verdict:
    """SERVES is the plan's assumption, which ends nobody. Here it would be said to be seen."""
    return server.verdict if server.verdict != SERVES else unheard or NOT_JUDGED
