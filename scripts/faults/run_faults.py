"""Faults of what is around trainer and servers: supervisors (M1), the driver (M2), Ray itself (N2)."""

from __future__ import annotations

import signal

from actors.processes.process_tree import descendants, name, send
from launcher.base.errors import UsageError
from launcher.run_files.run_paths import RunPaths
from scripts.faults import signals
from scripts.faults.declaration import ANY, FaultContext, Figures, Option, fault
from scripts.faults.signals import Missed
from scripts.run_processes import RunProcesses, title

OF_RAY = {
    "raylet": "raylet",
    "gcs": "gcs_server",
    "runtime_env_agent": "ray::RuntimeEnvAgent",
    "dashboard_agent": "ray::DashboardAgent",
}
"""By name or title. Where one of its agents ends, the raylet ends itself."""
DRIVER_SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM}


def check_supervisors(paths: RunPaths, found: RunProcesses) -> None:
    if not found.supervisors:
        raise UsageError("neither HealthMonitor nor Coordinator is below this run's driver", "M1 needs one of them")


def check_raylets(paths: RunPaths, found: RunProcesses) -> None:
    if not found.raylets:
        raise UsageError("no raylet is below this run's driver", "a cluster that the run joined isn't its own to break")


@fault(
    "M1",
    "HealthMonitor or Coordinator killed: SIGKILL",
    role="supervisor",
    check=check_supervisors,
    who=Option(ANY, "any: drawn by the seed", ("health_monitor", "coordinator", ANY)),
)
def kill_supervisor(context: FaultContext) -> Figures:
    who = context.word("who")
    if who == ANY:
        who = context.draw.choice(sorted(context.found.supervisors) or ["health_monitor"])
    process = context.found.supervisors.get(who)
    if process is None:
        raise Missed(f"{who} has no process now", f"there are: {', '.join(context.found.supervisors) or 'none'}")
    return {"target": who, **signals.kill([process])}


@fault(
    "M2",
    "driver killed, which begins another one; interrupted or terminated, which ends the run",
    signal=Option("kill", "which", tuple(DRIVER_SIGNALS)),
    noticed_as="supervisor",
)
def end_driver(context: FaultContext) -> Figures:
    number = DRIVER_SIGNALS[context.word("signal")]
    if not send(context.found.driver, number):
        raise Missed("the driver had ended before the signal", "try again")
    return {"target": "driver", "pids": [context.found.driver.pid], "signal": number.name}


@fault(
    "N2",
    "the run's own Ray cluster is lost: SIGKILL of one of Ray's processes; a new one takes its place",
    role="trainer",
    noticed_as="cluster",
    check=check_raylets,
    process=Option(ANY, "any: drawn by the seed", (*OF_RAY, ANY)),
)
def lose_ray(context: FaultContext) -> Figures:
    which = context.word("process")
    if which == ANY:
        which = context.draw.choice(sorted(OF_RAY))
    below = descendants(context.found.driver.pid)
    found = [process for process in below if OF_RAY[which] in (name(process), title(process))]
    if not found:
        raise Missed(f"Ray has no process {which} below this run's driver now", "try again, or another one")
    return {"target": "cluster", "process": which, **signals.kill(found[:1])}
