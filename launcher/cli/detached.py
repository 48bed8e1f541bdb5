"""Starts a run that outlives its command: the driver is an actor of the cluster.

    python -m launcher … cluster.detached=true
        │ checks, as for any run
        ├─► driver actor   a detached actor; runs the driver (launcher/driver.py), owns all other actors of the run
        └─► attach   shows the run from its files, ends with its exit code; Ctrl-C detaches, the run continues

The end of that actor ends everything it started, as the end of a driver does (P8). One that was lost with its node is
started again by Ray elsewhere: it waits until whatever its predecessor owned has ended, and resumes from the last
committed step. When the run has ended it ends itself, for good.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import ray

from actors.cluster.fencing import MARGIN_S, bind_to_cluster
from actors.cluster.joined_cluster import make_ready
from actors.cluster.ray_cluster import ray_cluster
from actors.reward.data_check import check_data
from launcher.base.errors import LauncherError, ResourceError, StillRunning, StorageError
from launcher.base.exit_codes import EXIT_CODES
from launcher.base.messages import TerminalStatus
from launcher.base.own_python import python
from launcher.checkpoints.resume_decision import already_finished, resume_point
from launcher.checkpoints.uploads import remote_of
from launcher.cli.attach import attach
from launcher.cli.unattended import DRIVER_ACTOR, Unattended, hide_webhook, same_command
from launcher.config.schema import RunConfig
from launcher.reporting.current_status import BEAT_S, next_beat
from launcher.run_files import control_requests
from launcher.run_files.journal import Journal
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunLock, RunPaths, names_of
from launcher.run_log.run_log import last_end

STARTED_S = 120.0
LOCK_S = 180.0
"""For the lock of a predecessor on a machine that is lost: a network file system takes its time to open it."""


class Drive(Protocol):
    """The driver (launcher/driver.py): runs `config` to its end and returns the exit code."""

    def __call__(
        self, config: RunConfig, *, server_entry: tuple[str, ...] | None = None, unattended: Unattended | None = None
    ) -> int: ...


def run(config: RunConfig, drive: Drive, *, server_entry: tuple[str, ...] | None = None) -> int:
    """Start the run on its cluster, and show it. Raises the UsageErrors that can be known before that.

    `drive` is called in the actor's process, so it must be importable by name there.
    """
    for note in check_data(config, tell_length=print):
        print(f"note: {note}", flush=True)
    paths = RunPaths.of(config)
    paths.prepare()
    config.cluster.fileroot = str(paths.fileroot)  # the actor may be on another machine, in another folder
    with RunLock(paths):  # nobody else runs it; the actor takes it next
        if finished := already_finished(config, paths):
            print(finished, flush=True)
            return EXIT_CODES[TerminalStatus.FINISHED]
        if remote_of(config) is None:  # else the actor may have to fetch what there is first
            resume_point(config, paths)
        ServerKeys.make(paths.keys)
        hide_webhook(config, paths)
        control_requests.forget(paths)
    say = functools.partial(print, flush=True)
    with ray_cluster(config, paths, num_cpus=0, say=say):
        make_ready(config, paths, say, besides="")
        options = {"name": DRIVER_ACTOR, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
        actor = (
            cast(Any, DetachedDriver)
            .options(**options)
            .remote(config, drive, same_command(), str(Path.cwd()), server_entry)
        )
        _wait_started(actor)
    print(f"detached: the run continues without this command; {control(paths)}", flush=True)
    return attach(paths)


def control(paths: RunPaths) -> str:
    """How to reach it from now on."""
    return f"{python()} -m scripts.run_control status|attach|pause|resume|stop {names_of(paths)}"


def _wait_started(actor: Any) -> None:
    try:
        ray.get(actor.begin.remote(), timeout=STARTED_S)
    except ray.exceptions.RayError as error:
        ray.kill(actor)
        raise ResourceError(
            f"the run's driver actor did not start on the cluster: {error}", "is this program installed on every node?"
        ) from error


@ray.remote
class DetachedDriver:
    """The driver as an actor. It drives on a separate thread: nobody calls an actor that Ray has restarted."""

    def __init__(
        self, config: RunConfig, drive: Drive, command: str, folder: str, server_entry: tuple[str, ...] | None = None
    ) -> None:
        bind_to_cluster(config)
        self._config = config
        self._drive_run = drive
        self._command = command
        self._folder = folder
        self._server_entry = server_entry
        self._is_again = ray.get_runtime_context().was_current_actor_reconstructed
        self._driving: threading.Thread | None = None
        if self._is_again:
            self.begin()

    def begin(self) -> int:
        """Its process, which drives from now on."""
        if self._driving is None:
            self._driving = threading.Thread(target=self._drive, name="driver", daemon=True)
            self._driving.start()
        return os.getpid()

    def _drive(self) -> None:
        paths = RunPaths.of(self._config)
        try:
            if Path(self._folder).is_dir():
                os.chdir(self._folder)  # relative paths of the configuration are the command's
            if self._is_again:
                time.sleep(self._config.cluster.lease_s + MARGIN_S)
                if last_end(paths) is not None:
                    return
            with (paths.logs / "driver.log").open("a", buffering=1) as out:
                unattended = Unattended(out=out, command=self._command, is_again=self._is_again)
                _with_patience(
                    lambda: self._drive_run(self._config, server_entry=self._server_entry, unattended=unattended),
                    is_stopped=lambda: control_requests.asks_to_stop(paths),
                )
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - a run ends with a status, whatever happened (P9)
            end_before_an_attempt(paths, error)
        finally:
            ray.kill(ray.get_actor(DRIVER_ACTOR))


def end_before_an_attempt(paths: RunPaths, error: BaseException) -> None:
    """The run's end, of a driver that could not begin an attempt. Not where another driver holds the lock and writes:
    of attempt 0 it would be taken for the end of that one's attempt, which goes on."""
    is_locked = isinstance(error, StillRunning) or isinstance(error.__cause__, StillRunning)
    if is_locked and next_beat(paths, BEAT_S) is not None:
        with (paths.logs / "driver.log").open("a") as out:
            print(f"another driver was refused: {error}", file=out)
        return
    status = TerminalStatus.ABORTED if isinstance(error, KeyboardInterrupt) else TerminalStatus.ERRORED
    code = error.exit_code if isinstance(error, LauncherError) else EXIT_CODES[status]
    Journal(paths.events, 0, time.time).record(f"run.{status.lower()}", reason=str(error), exit_code=code)


def _with_patience(drive_it: Callable[[], int], *, is_stopped: Callable[[], bool]) -> None:
    """Raises KeyboardInterrupt where `is_stopped` is true while the lock is waited for."""
    give_up_at = time.monotonic() + LOCK_S
    while True:
        try:
            drive_it()
        except StorageError as error:
            if is_stopped():
                raise KeyboardInterrupt("ended by a request, before the run's lock was free") from error
            if time.monotonic() > give_up_at:
                raise
            time.sleep(2.0)
        else:
            return
