"""A Ray cluster of several raylets on this machine, each a node whose processes a test may kill.

    with Raylets(folder) as cluster:          a head without CPUs: Coordinator and monitor may be there, nobody else
        node = cluster.add(cpus=2)            another raylet
        cluster.kill(node)                    SIGKILL of it and of all that it has started, by pid
        cluster.environment                   what a driver of it needs in its environment

Started as docs/clusters.md says, with the settings that we ship and a token of its own.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from actors.cluster.ray_cluster import RAY_ENVIRONMENT
from launcher.base.addresses import free_port
from tests.support.machine import scaled

RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True, eq=False)
class Raylet:
    process: subprocess.Popen
    name: str

    def family(self) -> list[psutil.Process]:
        """The raylet, its helpers, its workers and what those have started, the hosts too."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def raylet(self) -> psutil.Process:
        return next(process for process in self.family() if _is_raylet(process))


class Raylets:
    def __init__(
        self, folder: Path, *, head_cpus: int = 0, prefix: tuple[str, ...] = (), ip: str = "", **more: str
    ) -> None:
        """`prefix`: before the command of each node, as `ip netns exec …`; `ip`: of the head there."""
        self._ip = ip
        self._folder = Path(tempfile.mkdtemp(prefix="rl-"))  # short: a socket's path has 107 characters
        self._token = folder / "ray_token"
        self._token.write_text("1" * 64)
        self._token.chmod(0o600)
        self._head_cpus = head_cpus
        self._prefix = prefix
        self._logs = folder
        self.environment = {
            **os.environ,
            **RAY_ENVIRONMENT,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_TMPDIR": str(self._folder),
            **more,
        }
        self.port = free_port()
        self.nodes: list[Raylet] = []
        self._begun: list[Raylet] = []

    @property
    def address(self) -> str:
        return f"{self._ip or own_ip()}:{self.port}"

    def __enter__(self) -> "Raylets":
        try:
            self.start_head()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_head(self) -> Raylet:
        words = ["--head", f"--port={self.port}", f"--num-cpus={self._head_cpus}", "--include-dashboard=false"]
        if self._ip:
            words.append(f"--node-ip-address={self._ip}")
        self.head = self._start("head", [*words, f"--temp-dir={self._folder}/ray"], self._prefix)
        return self.head

    def add(
        self, *, cpus: float = 1, gpus: int = 0, name: str = "", prefix: tuple[str, ...] | None = None, ip: str = ""
    ) -> Raylet:
        name = name or f"node-{len(self.nodes)}"
        words = [f"--address={self.address}", f"--num-cpus={cpus:g}", *([f"--num-gpus={gpus}"] if gpus else [])]
        if ip or self._ip:
            words.append(f"--node-ip-address={ip or self._ip}")
        node = self._start(name, words, self._prefix if prefix is None else prefix)
        self.nodes.append(node)
        return node

    def _start(self, name: str, words: list[str], prefix: tuple[str, ...] = (), tries: int = 3) -> Raylet:
        log = self._logs / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*prefix, str(RAY), "start", "--block", "--disable-usage-stats", *words],
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        begun = Raylet(process=process, name=name)
        self._begun.append(begun)
        give_up_at = time.monotonic() + scaled(120.0)
        while "Ray runtime started" not in log.read_text(errors="replace"):
            if process.poll() is not None:
                assert tries > 1, log.read_text(errors="replace")  # Ray gives its processes 30 s, whatever the load
                return self._start(name, words, prefix, tries - 1)
            assert time.monotonic() < give_up_at, log.read_text(errors="replace")
            time.sleep(0.1)
        return begun

    def kill(self, node: Raylet) -> float:
        """As the loss of a machine: everything of it at once, the raylet first. Returns when, in unix seconds."""
        killed_at = time.time()
        family = [*node.family(), psutil.Process(node.process.pid)]
        family.sort(key=_is_raylet, reverse=True)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        node.process.wait()
        if node in self.nodes:
            self.nodes.remove(node)
        return killed_at

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._begun):
            with contextlib.suppress(psutil.Error):
                self.kill(node)
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_raylet(process: psutil.Process) -> bool:
    try:
        return process.name() == "raylet"
    except psutil.NoSuchProcess:  # ended since it was found
        return False


def own_ip() -> str:
    import ray

    return ray.util.get_node_ip_address()
