"""A real SGLang server for the length of a `with` block, started as a run starts it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from actors.live_rollouts import LoopThread
from actors.server_life import ServerSpec
from actors.sglang_server import SGLangProcess
from launcher.config import RunConfig
from launcher.messages import ServerInfo
from launcher.run_keys import ServerKeys


@contextmanager
def running_server(config: RunConfig) -> Iterator[tuple[ServerInfo, ServerKeys]]:
    """It, and its keys. Raises ServerError, with the log's decisive lines, where it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        spec = ServerSpec(
            index=0,
            config=config.sglang,
            log=Path(folder) / "llm_server-0.log",
            keys=ServerKeys.make(Path(folder) / "keys"),
            setup_timeout_s=config.rollout.setup_timeout,
        )
        thread = LoopThread("server")
        server = SGLangProcess(spec, owners=(os.getpid(),))
        try:
            thread.call(server.start(generation=0, model_path=config.sglang.model_path, weight_version=0))
            yield thread.call(server.wait_ready()), ServerKeys.read_file(spec.keys)
        finally:
            thread.call(server.stop())
            thread.close()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of all that live below it."""
    head = psutil.Process(pid)
    times = [process.cpu_times() for process in (head, *head.children(recursive=True))]
    return sum(time.user + time.system for time in times)
