"""A driver with a Ray cluster and server actors, as a process that a test can kill: who dies, and what is left.

`python -m tests.programs.server_driver SPEC` (JSON: folder, ray_folder, model_path, entry or null, servers) starts
them, prints one line of JSON with the pids once all servers are READY, and waits. `Driven` is the test's side of it.
"""

import functools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import ray

from actors.cluster.fencing import raylet_pid
from actors.cluster.ray_cluster import RAY_ENVIRONMENT, start_patiently
from actors.processes.process_host import HOST, ORDERS
from actors.processes.process_tree import (
    Process,
    command_line,
    descendants,
    identify,
    name,
    open_files,
    send,
    wait_ended,
)
from actors.serving.server_incarnation import SHARED_MEMORY
from actors.serving.sglang_server import SGLangServer
from launcher.base.addresses import free_port
from launcher.config.schema import RolloutConfig, RunConfig, SGLangConfig
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from scripts.run_processes import all_processes

PROMISE_S = 10.0
"""P8 (docs/design.md): within this time no process of the server is left."""
STAND_IN = [sys.executable, "-m", "tests.programs.stand_in_server", "--tree"]

log = logging.getLogger("server driver")


def start_ray(folder: Path, ray_folder: Path) -> None:
    """A local cluster with a secret of its own in `folder`.

    Ray's sockets lie in `ray_folder`, and their paths may have 107 characters: it must be a short one.
    """
    os.environ.update(RAY_ENVIRONMENT)
    token = folder / "token"
    token.write_text("0" * 64)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    start = functools.partial(
        ray.init,
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(ray_folder),
    )
    start_patiently(start, log.warning)


def run_config(folder: Path) -> tuple[RunConfig, RunPaths]:
    config = RunConfig(
        experiment_name="orphans",
        rollout=RolloutConfig(setup_timeout=300.0),
        sglang=SGLangConfig(dtype="float32", device="cpu", max_total_tokens=20000, random_seed=1),
    )
    config.cluster.fileroot = str(folder)
    paths = RunPaths.of(config)
    paths.prepare()
    ServerKeys.make(paths.keys)
    return config, paths


def main() -> None:
    spec = json.loads(sys.argv[1])
    folder = Path(spec["folder"])
    start_ray(folder, Path(spec["ray_folder"]))
    entry = None if spec["entry"] is None else tuple(spec["entry"])
    config, paths = run_config(folder)
    config.sglang.port = free_port(following=spec["servers"])  # nobody restarts a server whose port was taken
    actors = [SGLangServer.remote(config, paths, index, entry) for index in range(spec["servers"])]
    for actor in actors:
        actor.start.remote(generation=0, model_path=spec["model_path"], weight_version=1)
    infos = ray.get([actor.wait_ready.remote() for actor in actors])
    pids = {
        "driver": os.getpid(),
        "raylet": ray.get(ray.remote(raylet_pid).remote()),
        "actor": ray.get(actors[0].__ray_call__.remote(lambda _: os.getpid())),
    }
    servers = [{"pid": info.pid, "port": int(info.url.rpartition(":")[2])} for info in infos]
    print(json.dumps({"pids": pids, "servers": servers}), flush=True)
    threading.Event().wait()


class Driven:
    """A driver that runs; at the end of the block, it and all that it started are ended."""

    def __init__(self, folder: Path, *, model_path: str, entry: list[str] | None, servers: int = 1) -> None:
        self._folder = folder
        self._ray_folder = tempfile.mkdtemp(prefix="ray-")
        spec = {"folder": str(folder), "ray_folder": self._ray_folder, "model_path": model_path, "entry": entry}
        self._spec = json.dumps(spec | {"servers": servers})

    def __enter__(self) -> "Driven":
        self._errors = (self._folder / "driver.err").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.server_driver", self._spec],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # or the end, where it failed
        self._everything = descendants(self.process.pid)
        if not line:
            self.__exit__()
            raise AssertionError(Path(self._errors.name).read_text())
        started = json.loads(line)
        self.pids: dict[str, int] = started["pids"]
        self._servers: list[dict[str, int]] = started["servers"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for process in self._everything:
            send(process, signal.SIGKILL)
        self._errors.close()
        shutil.rmtree(self._ray_folder, ignore_errors=True)

    def server_tree(self, index: int) -> list[Process]:
        """A server's host, who writes its log, and all below."""
        top = identify(self._servers[index]["pid"])
        assert top is not None
        found = dict[Process, None]()
        for process in all_processes():
            words = command_line(process) if name(process) == HOST else []
            log = Path(words[words.index(ORDERS) + 2]) if ORDERS in words else Path()
            if log.name == f"llm_server-{index}.log" and log.is_relative_to(self._folder):
                found |= dict.fromkeys([process, *descendants(process.pid)])
        assert top in found
        return list(found)

    def is_forked(self, index: int) -> bool:
        """Whether the server has its host's command."""
        return ORDERS in command_line(Process(self._servers[index]["pid"], 0))

    def kill(self, victim: str, index: int) -> list[Process]:
        """SIGKILL it; returns what of the server's tree is left after `PROMISE_S`. "actor" is the first server's."""
        tree = self.server_tree(index)
        assert len(tree) >= 4, "host, server and at least two more"
        os.kill(self.pids[victim], signal.SIGKILL)
        wait_ended(tree, PROMISE_S)
        return [process for process in tree if identify(process.pid) == process]

    def shared_memory(self, index: int) -> set[Path]:
        """The files that a server's scheduler shares, which a killed process leaves behind."""
        return {file for process in self.server_tree(index) for file in open_files(process.pid, SHARED_MEMORY)}

    def port_is_free(self, index: int) -> bool:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return trial.connect_ex(("127.0.0.1", self._servers[index]["port"])) != 0


if __name__ == "__main__":
    main()
