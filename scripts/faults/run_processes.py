"""Finds the processes of a live run, each verified to belong to it.

    .run.lock ─► driver: it holds that file open ─► its descendants: raylet, trainer, supervisors by their Ray titles
    /proc     ─► guards: started with this run's own llm_server-<i>.log ─► their children, the servers

A process is its pid and its start time (`process_tree.Process`); every signal checks both again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.processes.forked_start import ORDERS
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
from launcher.base.errors import UsageError
from launcher.run_files.run_paths import RunPaths

GUARD = "actors.processes.process_guard"
SUPERVISORS = {"HealthMonitorActor": "health_monitor", "CoordinatorActor": "coordinator"}
"""Their classes, of which Ray makes their titles."""
TRAINER = "Trainer"
TITLE = re.compile(r"ray::(\w+)")


class NotLive(UsageError):
    """There is no such run on this machine now."""


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
    """The process that signed the run's lock and still holds it open. Raises NotLive."""
    run = f"{paths.experiment_name}/{paths.trial_name} below {paths.fileroot}"
    try:
        signed = json.loads(paths.lock.read_text())
        pid, host = int(signed["pid"]), str(signed["host"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotLive(f"no run {run}: {paths.lock} is not there or not signed", "see --fileroot and --run") from error
    if tool := signed.get("tool"):
        raise NotLive(f"{run} is not running: the last to hold it was {tool} (pid {pid})", "start it, then inject")
    if host != socket.gethostname():
        raise NotLive(f"{run} runs on {host}", "inject there: only processes of the same machine can be signalled")
    process = identify(pid)
    if process is None or not holds_open(process, paths.lock):
        raise NotLive(f"{run} is not running: its driver (pid {pid}) has ended", "start it, then inject")
    return process


def is_live(paths: RunPaths) -> bool | None:
    """None: the run is on another machine, so it is not known here."""
    try:
        find_driver(paths)
    except NotLive as error:
        return None if " runs on " in error.message else False
    return True


def live_runs(fileroot: Path) -> list[RunPaths]:
    """Runs below `fileroot` whose driver is alive."""
    found = []
    for lock in sorted(fileroot.glob("logs/*/*/*/.run.lock")):
        user, experiment, trial = lock.parts[-4:-1]
        paths = RunPaths(fileroot=fileroot, user=user, experiment_name=experiment, trial_name=trial)
        if is_live(paths):
            found.append(paths)
    return found


def _trainer_elsewhere(paths: RunPaths) -> Process | None:
    """In a cluster that the run joined its workers aren't below the driver; the trainer holds its own log open."""
    titles = ((process, TITLE.match(title(process))) for process in all_processes())
    return _first_to_log([process for process, match in titles if match and match[1] == TRAINER], paths)


def _first_to_log(trainers: Sequence[Process], paths: RunPaths) -> Process | None:
    """A parked one has no log open."""
    return next((process for process in trainers if holds_open(process, paths.trainer_log)), None)


# ── servers ──


def find_servers(paths: RunPaths) -> Iterator[LiveServer]:
    """Those whose guard says that it writes this run's logs, STARTING ones too."""
    guards: dict[int, dict[Process, list[str]]] = {}
    for process in all_processes():
        words = command_line(process)
        if GUARD in words and "--log" in words and ORDERS not in words:  # not a template's
            log = words[words.index("--log") + 1]
            index = _index_of(log, paths)
            if index is not None and words[words.index("--mark") + 1] == server_mark(Path(log)):
                guards.setdefault(index, {})[process] = words
    for index, group in sorted(guards.items()):
        if server := _server_below(index, group):
            yield server


def _index_of(log: str, paths: RunPaths) -> int | None:
    match = re.fullmatch(r"llm_server-(\d+)\.log", Path(log).name)
    return int(match[1]) if match and paths.server_log(int(match[1])) == Path(log) else None


def _server_below(index: int, guards: Mapping[Process, list[str]]) -> LiveServer | None:
    """The guard's oldest child that isn't a guard; orphans that it adopted are younger. Its arguments are among the
    guard's: a server that was forked has its template's."""
    heads = [child for guard in guards for child in children(guard.pid) if child not in guards and not _is_guard(child)]
    if not heads:
        return None
    http = min(heads, key=lambda head: (head.started, head.pid))
    members = {process for guard in guards for process in descendants(guard.pid)}
    tree = tuple(process for process in members if process not in guards and not _is_guard(process))
    return LiveServer(index=index, http=http, url=_url(next(iter(guards.values()))), tree=tree)


def _is_guard(process: Process) -> bool:
    return GUARD in command_line(process)


def _url(words: list[str]) -> str:
    """Where it listens by its own arguments, of which the last count; empty where they don't say."""
    said = {key: value for key, value in itertools.pairwise(words) if key in {"--host", "--port"}}
    host = {"0.0.0.0": "127.0.0.1"}.get(said.get("--host", "127.0.0.1"), said.get("--host", "127.0.0.1"))
    return f"http://{host}:{said['--port']}" if "--port" in said else ""


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
