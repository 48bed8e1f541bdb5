"""A Ray cluster for one run: a local one that ends with it, or a running one by its address.

The environment is set before Ray starts, because Ray's own processes read it then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.worker as ray_worker
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled, and left out of its stub

from actors.cluster.failed_start import error_in_logs, remedy_of_start
from actors.cluster.joined_cluster import HeadWatch
from actors.cluster.ray_oom_kills import MONITOR_INTERVAL
from actors.processes.process_host import HOST
from actors.processes.process_tree import (
    Process,
    bearing,
    descendants,
    dying_with,
    members_of_group,
    name,
    send,
    wait_ended,
)
from launcher.base.errors import ResourceError
from launcher.base.private_folders import make_private, parent_of_rays_folder
from launcher.base.wording import signal_name
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import make_ray_token
from launcher.run_files.run_paths import RunPaths

RAY_ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # `uv run` would build a new environment for every worker
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_process_group_cleanup_enabled": "1",
    "RAY_worker_niceness": "0",  # at Ray's 15, trainer and servers would yield to everything else
    "RAY_task_events_report_interval_ms": "0",  # a record of each call, for a dashboard that isn't started
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    MONITOR_INTERVAL: "0",  # Ray would kill a trainer whose machine still has memory, and tell nobody who waits for it
}

START_S = 240.0
"""A local cluster is tried again for so long: Ray gives up after 30 s, and its raylet ends itself after 15 s without an
answer of its helpers, which a busy machine needs to import what they use. Neither can be set."""
TOO_SOON_S = 10.0
"""A try that fails sooner has not failed for the load, and is repeated once."""
KILLED_S = 3.0
"""For the end of what was killed."""
STRAGGLERS_S, HOSTS_S = 3.0, 10.0
"""For what a cluster leaves to end by itself: actors take milliseconds, a host seconds where its server is large."""
LOOK_S = 0.1
MARK = "GRPO_CLUSTER"
"""In the environment of all that a local cluster starts, and of all that those start: its own name."""

TITLE_OF_RAYS = "ray::"
"""Of Ray's agents, and of its workers."""

VITAL = ("gcs_server", "raylet")
"""Ray's processes without which its calls wait for ever: it restarts actors, but not these."""
STOPPED_S = 60.0
"""After which one of them that was stopped is ended."""
FAILED_AGENT = re.compile(r"because one Ray agent failed, agent_name = (\w+)")
"""As the raylet's log has it: it ends itself when one of its agents does."""


class VitalProcesses:
    """Watches the cluster processes that this process has started. `mark`: what is in the environment of all of them;
    `logs`: Ray's own."""

    def __init__(self, mark: str = "", logs: Path | None = None) -> None:
        self.mark = mark
        self.logs = {} if logs is None else {name: logs / f"{name}.out" for name in VITAL}
        self._processes: dict[psutil.Process, str] = {}
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # any other that ends meanwhile is not looked for
                if (called := child.name()) in VITAL:
                    self._processes[child] = called
        self._stopped_at: dict[int, float] = {}

    def lost_nodes(self) -> dict[str, str]:
        """A cluster of the run's own has one node, which is the driver's."""
        return {}

    def lost(self) -> str:
        """Which of them has ended, and how, as far as it can be seen; "" where none has. A zombie has ended: nobody may
        be left to collect it. One that stays stopped (SIGSTOP) is ended: nothing that it ran can begin again."""
        for process, called in self._processes.items():
            try:
                if (status := process.status()) != psutil.STATUS_ZOMBIE and not self._end_if_stopped(process, status):
                    continue
            except psutil.NoSuchProcess:
                pass
            return f"Ray's own process {called} ended{self._how(process.pid, called)}, and with it all that it ran"
        return ""

    def end(self, pids: Collection[int]) -> None:
        """SIGKILL those of `pids` that belong to this cluster."""
        for process in bearing(self.mark):
            if process.pid in pids:
                send(process, signal.SIGKILL)

    def _end_if_stopped(self, process: psutil.Process, status: str) -> bool:
        """Whether it was ended, as one that has not continued for STOPPED_S."""
        if status != psutil.STATUS_STOPPED:
            self._stopped_at.pop(process.pid, None)
        elif time.monotonic() - self._stopped_at.setdefault(process.pid, time.monotonic()) > STOPPED_S:
            process.kill()
            return True
        return False

    def _how(self, pid: int, called: str) -> str:
        """By the kernel, and by what the raylet wrote last about its agents."""
        if pid in self._stopped_at:
            return f" (it was stopped, did not continue for {STOPPED_S:g} s, and was killed for it)"
        code = dying_with(pid)
        if code is not None and code < 0:
            return f" (by {signal_name(-code)})"
        with contextlib.suppress(OSError, KeyError):
            if failed := FAILED_AGENT.findall(self.logs[called].read_text(errors="replace")):
                return f" (its log: the agent {failed[-1]} failed)"
        return "" if code is None else f" (exit code {code})"


def keep_off_the_screen(file: Path) -> None:
    """Redirect what Ray prints about each process that died into `file`: the run reports it itself, in one line.

    `log_to_driver` does not cover these messages, and Ray has no setting for them.
    """
    if not callable(getattr(ray_worker, "print_to_stdstream", None)):
        return

    def write(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        with contextlib.suppress(OSError), file.open("a") as log:
            for line in data.get("lines", ()):
                log.write(f"({data.get('pid')}) {line}\n")

    ray_worker.print_to_stdstream = write


@contextmanager
def ray_cluster(
    config: RunConfig,
    paths: RunPaths,
    *,
    num_cpus: float,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[VitalProcesses | HeadWatch]:
    """Start or join the cluster; at exit, shut down what was started. Raises ResourceError where none answers.

    `say` gets a line for each start that fails and is tried again; `is_stopped` is asked before, and KeyboardInterrupt
    raised where it is true.
    """
    for variable, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    keep_off_the_screen(paths.logs / "ray.log")
    local = config.cluster.address == "local"
    if ray.is_initialized() and not local:  # a detached run is on its cluster already
        yield HeadWatch()
        return
    if local:
        lock_with_a_token(make_ray_token(paths.keys))
    folder = ray_folder() if local else None
    connect = functools.partial(_connect, config, paths, num_cpus=num_cpus, folder=folder)
    began = time.time()
    mark = f"{MARK}={uuid.uuid4().hex}"
    os.environ[MARK] = mark.partition("=")[2]
    try:
        try:
            start_patiently(connect, say, logs=folder, is_stopped=is_stopped) if local else connect()
        except Exception as error:  # Ray raises a bare Exception where its own processes start too slowly
            raise ResourceError(
                f"no Ray cluster at cluster.address={config.cluster.address}: {error}",
                remedy_of_start(error, folder, began, took_long=time.time() - began >= TOO_SOON_S)
                if folder is not None
                else "start one there, and have its RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here too "
                "(docs/clusters.md); or leave cluster.address=local",
            ) from error
        except SystemExit as error:  # Ray's own handler of SIGTERM, until the driver listens again
            raise KeyboardInterrupt from error
        finally:
            del os.environ[MARK]  # what this process starts besides is not the cluster's
        if local and not is_token_auth_enabled():
            raise ResourceError("Ray started without its token authentication", "unset RAY_AUTH_MODE")
        yield VitalProcesses(mark, _logs()) if local else HeadWatch()
    finally:
        ray.shutdown()
        if local:
            end_leftovers(mark)


def start_patiently(
    connect: Callable[[], Any],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    *,
    logs: Path | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Any:
    """`connect`, and again where it fails, as long as the machine may be too busy. Raises what it raised last, and
    KeyboardInterrupt where `is_stopped` is true after a try that failed.

    `logs`: Ray's folder. Where its processes wrote why they ended, the machine is not said to be busy.
    """
    began, is_first = clock(), True
    while True:
        tried, before = clock(), set(psutil.Process().children(recursive=True))
        wall_clock = time.time()
        try:
            return connect()
        except Exception as error:
            ray.shutdown()
            end_children(but=before)
            if is_stopped():  # the first signal is only counted: four minutes of tries would not hear it
                raise KeyboardInterrupt from error
            failed = clock()
            may_be_load = failed - tried >= TOO_SOON_S and failed - began < START_S
            if not (is_first or may_be_load):
                raise
            is_first = False
            load, processors = os.getloadavg()[0], os.cpu_count() or 1
            why = (
                error_in_logs(logs, wall_clock) or f"the load of this machine is {load:.1f} on {processors} processors"
            )
            say(f"Ray did not start within {failed - tried:.0f} s ({why}), and is started again: {error}")


def end_children(*, but: Collection[psutil.Process]) -> None:
    """Kill what a start that failed has left, which Ray forgets. A dead raylet among the living start's processes would
    be taken for the end of the cluster (`VitalProcesses`)."""
    left = [child for child in psutil.Process().children(recursive=True) if child not in but]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=KILLED_S)


def lock_with_a_token(file: Path) -> None:
    """Make the cluster that is started next, and this process, use the token in `file` and no other.

    Ray's servers listen on every interface, so only the token keeps others out. Ray turns it on by itself for a local
    cluster unless the environment forbids it; RAY_AUTH_MODE is read too early to be set here.
    """
    for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(variable, None)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
    AuthenticationTokenLoader.instance().reset_cache()  # of an earlier run in this process


def ray_folder() -> Path:
    """Where Ray keeps sockets and logs: below a private folder, since Ray makes its own writable by everybody (0777).

    The path is short: a socket's may have 107 bytes, 64 of which are Ray's (`environment_checks` refuses a longer one).
    """
    parent = parent_of_rays_folder()
    folder = parent / f"grpo-ray-{os.geteuid()}"
    try:
        make_private(folder)
    except OSError:  # another user was there first
        folder = Path(tempfile.mkdtemp(dir=parent, prefix="ray-"))
    return folder / "ray"


def _logs() -> Path | None:
    """Where the processes of the cluster that this process has started write their logs."""
    node = getattr(ray_worker, "_global_node", None)
    return None if node is None else Path(node.get_logs_dir_path())


def end_leftovers(
    mark: str = "",
    *,
    find: Callable[[], Collection[Process]] | None = None,
    patience_s: float = STRAGGLERS_S,
    hosts_s: float = HOSTS_S,
) -> list[int]:
    """Wait for all that bears a cluster's mark, or that `find` finds, to end, and kill what does not; returns the pids.

    Actors end when their raylet does, and hosts then end the servers. What would stay: an actor that is stopped, a
    worker that is starting while Ray's own processes are killed, which searches for them for a minute, and Ray's
    agents, which for a minute report a killed raylet to a GCS that is gone too.
    """
    find = find or functools.partial(_of_cluster, mark)

    def stragglers() -> list[Process]:
        left = find()
        hosted = _hosts_and_hosted(left)
        return [one for one in left if one not in hosted]

    return _end_within(patience_s, stragglers) + _end_within(hosts_s, find)


def _of_cluster(mark: str) -> list[Process]:
    """Agents too, whose title covers their environment: they stay in the group of processes that the driver leads."""
    found = bearing(mark)
    titled = [one for one in members_of_group(os.getpid()) if name(one).startswith(TITLE_OF_RAYS)]
    return [*found, *(one for one in titled if one not in found)]


def _end_within(patience_s: float, find: Callable[[], Collection[Process]]) -> list[int]:
    give_up_at = time.monotonic() + patience_s
    while (left := find()) and time.monotonic() < give_up_at:
        time.sleep(LOOK_S)
    killed = [process for process in left if send(process, signal.SIGKILL)]
    wait_ended(killed, KILLED_S)
    return [process.pid for process in killed]


def _hosts_and_hosted(left: Collection[Process]) -> set[Process]:
    hosts = [process for process in left if name(process) == HOST]
    return {process for host in hosts for process in (host, *descendants(host.pid))}


def _connect(config: RunConfig, paths: RunPaths, *, num_cpus: float, folder: Path | None) -> None:
    """`folder`: Ray's own, of a cluster that is started; None: one that is joined."""
    local = folder is not None
    ray.init(
        address=config.cluster.address,
        namespace=paths.namespace,
        include_dashboard=False if local else None,
        dashboard_host="127.0.0.1",
        _metrics_export_port=config.cluster.metrics_port,
        _temp_dir=None if folder is None else str(folder),
        num_cpus=math.ceil(max(num_cpus, os.cpu_count() or 1)) if local else None,
        num_gpus=config.cluster.n_gpus_per_node if local else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
