"""What the tests of check_health share."""

import dataclasses

from launcher.base.messages import Health, ServerState, Verdict
from launcher.reporting.current_status import RunHealth, ServerHealth
from scripts.health.run_check import find_subject


def subject_of(paths, **changes):
    found = find_subject(paths, timeout_s=5.0, recent_s=60.0)
    return dataclasses.replace(found, **changes)


def verdicts(findings):
    return [finding.level for finding in findings]


def verdict(health=Health.HEALTHY, reason="it makes tokens", cause=None):
    return Verdict(health=health, reason=reason, cause=cause)


def server(name="server-0", state=ServerState.READY, judged=None, **more):
    return ServerHealth(name=name, state=state, verdict=judged or verdict(), **{"weight_version": 7} | more)


def health_of(*servers, trainer=None, rewards=None):
    return RunHealth(age_s=0.5, trainer=trainer or verdict(), rewards=rewards or verdict(), servers=servers)
