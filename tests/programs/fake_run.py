"""A run as the injector sees it, made of real processes: `python -m tests.programs.fake_run FOLDER`, see --help.

A driver that holds the run's lock; below it a raylet, a trainer, a health monitor and a coordinator under their Ray
titles; servers in their hosts that do nothing (`tests.programs.fake_tree`, with a child called sglang::scheduler by its
command). It writes `server.ready` for each server, and a line of the ledger whenever it reads a line from its standard
input.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from actors.processes.hosted_process import HostedProcess, ProcessLaunch
from actors.serving.server_incarnation import server_mark
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_paths import RunLock, RunPaths
from scripts.run_processes import find_run
from tests.support.machine import factor

SLEEP = "import ctypes, time\nctypes.CDLL(None).prctl(1, 9)\nwhile True: time.sleep(1000)"
"""It dies with its parent, as Ray's workers do in the end."""
SERVER = f"""
import socket, subprocess, sys
listens = socket.create_server(("127.0.0.1", 0))
part = lambda title: subprocess.Popen([title, "-S", "-c", {SLEEP!r}], executable=sys.executable)
parts = [part("sglang::scheduler"), part("sglang::detokenizer")]
parts[0].wait()
"""


TRAINER = """
import ctypes, mmap, resource, sys, time
ctypes.CDLL(None).prctl(1, 9)
log, unlimited_mib, limited_mib, slowness = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
while mib := unlimited_mib if resource.getrlimit(resource.RLIMIT_DATA)[0] < 0 else limited_mib:
    try:
        with mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE) as taken:
            for page in range(0, len(taken), mmap.PAGESIZE):
                taken[page] = 1
            time.sleep(0.05 * slowness)
    except OSError as error:
        open(log, "a").write(f"OSError: {error}")
        sys.exit(1)
    time.sleep(0.1)
while True: time.sleep(1000)
"""
"""It takes so many MiB again and again, as in steps, and ends where they are refused. On a busy machine it holds them
for longer: who looks for them gets his turn less often."""


def run_paths(folder: Path) -> RunPaths:
    config = RunConfig(experiment_name="game", trial_name="day")
    config.cluster.fileroot = str(folder)
    return RunPaths.of(config)


def titled(title: str, code: str = SLEEP, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [title, "-S", "-c", code, *words],
        executable=sys.executable,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


async def hosted_server(paths: RunPaths, index: int) -> HostedProcess:
    """Start one in its host."""
    log = paths.server_log(index)
    launch = ProcessLaunch(
        command=[sys.executable, "-S", "-c", SERVER],
        environment=dict(os.environ),
        log=log,
        mark=server_mark(log),
        watch=[os.getpid()],
        grace_s=0.0,
    )
    return await HostedProcess.launch(launch)


def all_up(paths: RunPaths, servers: int) -> bool:
    """Each process bears the title that it was given: until its exec it has its parent's."""
    found = find_run(paths)
    parts = [server.part(part) for server in found.servers for part in ("scheduler", "detokenizer")]
    return len(parts) == 2 * servers and all(parts) and found.trainer is not None and len(found.supervisors) == 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--step-mib", type=int, default=0, help="that the trainer takes in each of its steps")
    parser.add_argument("--limited-step-mib", type=int, default=0, help="that it takes once RLIMIT_DATA limits it")
    given = parser.parse_args()
    mib = [str(given.step_mib), str(given.limited_step_mib)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    paths = run_paths(given.folder)
    paths.prepare()
    with RunLock(paths) as lock:
        journal = Journal(paths.events, lock.next_attempt())
        actors = [titled(name) for name in ("ray::HealthMonitorActor", "ray::CoordinatorActor.run")]
        actors.append(titled("ray::Trainer.run", TRAINER, str(paths.trainer_log), *mib, str(factor())))
        hosts = asyncio.Runner()
        for index in range(given.servers):
            server = hosts.run(hosted_server(paths, index))
            journal.record("server.ready", subject=f"server-{index}", pid=server.pid)
        while not all_up(paths, given.servers):
            time.sleep(0.01)
        print("up", flush=True)
        try:
            for step, _ in enumerate(sys.stdin):
                append_line(paths.ledger, {"global_step": step})
                print(step, flush=True)
        finally:
            for actor in actors:
                actor.kill()


if __name__ == "__main__":
    main()
