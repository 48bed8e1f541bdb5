"""Finds the processes of a live run, each verified to belong to it.

    .run.lock ─► keeper: it holds that file open ─► driver ─► raylet, trainer, supervisors by their Ray titles
    /proc     ─► hosts: started with this run's own llm_server-<i>.log ─► their children, the servers

A process is its pid and its start time (`process_tree.Process`); every signal checks both again.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from actors.processes.process_host import HOST, ORDERS
from actors.processes.process_tree import (
    PROC,
    Process,
    children,
    command_line,
    descendants,
    identify,
    name,
    stat_fields,
)
from actors.serving.server_incarnation import server_mark
from launcher.base.errors import LauncherError, UsageError
from launcher.cli import keeper
from launcher.reporting.current_status import BEAT_S, CurrentStatus, next_beat
from launcher.run_files.run_paths import RunPaths, is_lock_free, last_attempt, pid_namespace
from launcher.run_files.run_search import runs_below
from launcher.run_log.run_log import last_end

SUPERVISORS = {"HealthMonitorActor": "health_monitor", "CoordinatorActor": "coordinator"}
"""Their classes, of which Ray makes their titles."""
TRAINER = "Trainer"
TITLE = re.compile(r"ray::(\w+)")
STOPPED = ("T", "t", "Z")
"""Letters of proc(5) of a process that does nothing more by itself."""


class NotLive(UsageError):
    """There is no such run on this machine now."""


class RunsElsewhere(NotLive):
    """Its lock is signed on another machine, or in another container."""


class HolderEnded(NotLive):
    """Who signed its lock is no process that is seen from here; nothing but a tool, or one of a container's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveServer:
    """One incarnation of a server. `http` is its main process, `tree` that and all below it."""

    index: int
    http: Process
    url: str
    tree: tuple[Process, ...]

    @property
    def name(self) -> str:
        return f"server-{self.index}"

    def part(self, which: str) -> tuple[Process, ...]:
        """Its processes of that name; empty where it has none."""
        match which:
            case "http":
                return (self.http,)
            case "tree":
                return self.tree
        return tuple(process for process in self.tree if title(process).startswith(f"sglang::{which}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    """The processes of a run that are alive on this machine now."""

    driver: Process
    raylets: tuple[Process, ...]
    trainer: Process | None
    standby_trainer: Process | None
    supervisors: Mapping[str, Process]
    servers: tuple[LiveServer, ...]

    def server(self, index: int) -> LiveServer | None:
        return next((server for server in self.servers if server.index == index), None)


def find_run(paths: RunPaths) -> RunProcesses:
    """Raises NotLive where no driver of this run is alive here."""
    driver = find_driver(paths)
    tree = descendants(driver.pid)
    actors: dict[str, Process] = {}
    trainers: list[Process] = []
    for process in tree:
        if match := TITLE.match(title(process)):
            actors.setdefault(match[1], process)
            trainers += [process] if match[1] == TRAINER else []
    trainer = _first_to_log(trainers, paths) or next(iter(trainers), None) or _trainer_elsewhere(paths)
    return RunProcesses(
        driver=driver,
        raylets=tuple(process for process in tree if name(process) == "raylet"),
        trainer=trainer,
        standby_trainer=next((one for one in trainers if one != trainer), None),
        supervisors={word: actors[cls] for cls, word in SUPERVISORS.items() if cls in actors},
        servers=tuple(find_servers(paths)),
    )


def find_driver(paths: RunPaths) -> Process:
    """The keeper's child that drives the run, or who holds the lock without a keeper. Raises NotLive."""
    holder = find_holder(paths)
    if keeper.__name__ not in command_line(holder):  # a detached run, or a benchmark
        return holder
    for process in children(holder.pid):
        if "".join(command_line(process)[-1:]).startswith(keeper.TASK):
            return process
    raise NotLive(f"{paths.title} has no driver at the moment: its keeper begins another one", "try again")


def find_holder(paths: RunPaths) -> Process:
    """The process that signed the run's lock and still holds it open. Raises NotLive."""
    run = f"{paths.experiment_name}/{paths.trial_name} below {paths.fileroot}"
    try:
        signed = json.loads(paths.lock.read_text())
        pid, host = int(signed["pid"]), str(signed["host"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotLive(f"no run {run}: {paths.lock} is not there or not signed", "see --fileroot and --run") from error
    if tool := signed.get("tool"):
        raise HolderEnded(f"{run} is not running: the last to hold it was {tool} (pid {pid})", "start it, then inject")
    if host != socket.gethostname():
        raise RunsElsewhere(
            f"{run} runs on {host}", "inject there: only processes of the same machine can be signalled"
        )
    if signed.get("pid_namespace", here := pid_namespace()) != here:  # its number is another process here, or none
        if is_lock_free(paths):
            raise HolderEnded(
                f"{run} is not running: its driver has ended, in another container", "start it, then inject"
            )
        raise RunsElsewhere(
            f"{run} runs in another container on {host}", "inject there: only processes that are seen can be signalled"
        )
    process = identify(pid)
    if process is None or not holds_open(process, paths.lock):
        kind = HolderEnded if process is None else NotLive  # what another user's process holds open is not seen
        raise kind(f"{run} is not running: its driver (pid {pid}) has ended", "start it, then inject")
    return process


def is_live(paths: RunPaths) -> bool | None:
    """None: the run is on another machine or in another container, so it is not known here."""
    try:
        find_holder(paths)
    except RunsElsewhere:
        return None
    except NotLive:
        return False
    return True


def seen_to_write(paths: RunPaths, at_most_s: float = math.inf) -> CurrentStatus | None:
    """What the run writes now, wherever it is; None where it was not seen to write."""
    try:
        find_holder(paths)
    except RunsElsewhere:  # whose hold of the lock may not be seen here
        if _has_written_its_end(paths):
            return None
    except NotLive:  # its process has ended, and its number may be another's
        if is_lock_free(paths):  # else it is of a container, which shows no process here
            return None
    return next_beat(paths, min(BEAT_S, at_most_s))


def _has_written_its_end(paths: RunPaths) -> bool:
    """Its last attempt has, and no other has begun since: nothing more is to come."""
    try:
        end = last_end(paths)
        return end is not None and end.get("attempt") == last_attempt(paths)
    except LauncherError:  # it can't be read here: it is not known
        return False


def live_runs(fileroot: Path) -> list[RunPaths]:
    """Runs below `fileroot` whose driver is alive."""
    return [paths for paths in runs_below(fileroot) if is_live(paths)]


def only_live_run(fileroot: Path, user: str) -> RunPaths | None:
    """The user's; None where there is none, or more than one."""
    live = [paths for paths in live_runs(fileroot) if paths.user == user]
    return live[0] if len(live) == 1 else None


def _trainer_elsewhere(paths: RunPaths) -> Process | None:
    """In a cluster that the run joined its workers aren't below the driver; the trainer holds its own log open."""
    titles = ((process, TITLE.match(title(process))) for process in all_processes())
    return _first_to_log([process for process, match in titles if match and match[1] == TRAINER], paths)


def _first_to_log(trainers: Sequence[Process], paths: RunPaths) -> Process | None:
    """A parked one has no log open."""
    return next((process for process in trainers if holds_open(process, paths.trainer_log)), None)


# ── servers ──


def find_servers(paths: RunPaths) -> Iterator[LiveServer]:
    """Those whose host says that it writes this run's logs, STARTING ones too."""
    hosts: dict[int, Process] = {}
    for process in all_processes():
        words = command_line(process) if name(process) == HOST else []
        log = Path(words[words.index(ORDERS) + 2]) if ORDERS in words else Path()
        index = _index_of(log, paths)
        if index is not None:
            variable, _, value = server_mark(log).partition("=")
            if environment(process).get(variable) == value:
                hosts[index] = process
    for index, host in sorted(hosts.items()):
        if server := _server_below(index, host):
            yield server


def _index_of(log: Path, paths: RunPaths) -> int | None:
    match = re.fullmatch(r"llm_server-(\d+)\.log", log.name)
    return int(match[1]) if match and paths.server_log(int(match[1])) == log else None


def _server_below(index: int, host: Process) -> LiveServer | None:
    """The host's oldest child; orphans that it adopted are younger."""
    heads = children(host.pid)
    if not heads:
        return None
    http = min(heads, key=lambda head: (head.started, head.pid))
    return LiveServer(index=index, http=http, url=_url(http), tree=tuple(descendants(host.pid)))


def _url(http: Process) -> str:
    """Where it listens; empty until it does. A forked server's arguments are not in its command line."""
    with contextlib.suppress(psutil.Error):
        for found in psutil.Process(http.pid).net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN:
                host, port = found.laddr
                return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return ""


# ── /proc ──


def holds_open(process: Process, path: Path) -> bool:
    """Has it that very file open? Not where it is gone, or another user's."""
    gone = contextlib.suppress(OSError)
    with gone:
        for descriptor in (PROC / str(process.pid) / "fd").iterdir():
            with gone:  # that one alone was closed meanwhile
                if descriptor.samefile(path):
                    return identify(process.pid) == process
    return False


def state(process: Process) -> str:
    """One letter, proc(5); empty once it is gone."""
    fields = stat_fields(process.pid)
    return fields[0] if fields and identify(process.pid) == process else ""


def title(process: Process) -> str:
    """The first word of its command, which Ray and SGLang overwrite with what it does."""
    return (command_line(process) or [""])[0].strip()


def environment(process: Process) -> dict[str, str]:
    """As it was started; empty where it is gone or another user's."""
    try:
        data = (PROC / str(process.pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0"))
    return {key: value for key, _, value in pairs}


def all_processes() -> Iterator[Process]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (process := identify(int(entry.name))):
            yield process
