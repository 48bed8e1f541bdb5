"""What the Coordinator gets from the HealthMonitor: each server's report, and what is wrong with the learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.serving.server_report import ServerReport
from launcher.base.messages import Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReport:
    """`servers` by name. `incident_age_s`: seconds since `incident` was first seen; its `since` is of another clock."""

    servers: Mapping[str, ServerReport] = field(default_factory=dict)
    incident: Incident | None = None
    incident_age_s: float = 0.0
