"""A real SGLang server for the length of a `with` block, started as a run starts it, and its client."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from actors.processes.loop_thread import LoopThread
from actors.serving.server_incarnation import ServerSpec
from actors.serving.sglang_server import SGLangProcess
from launcher.base.messages import ServerInfo
from launcher.config.schema import RunConfig
from launcher.run_files.run_keys import ServerKeys


@contextmanager
def running_server(
    config: RunConfig, *, index: int = 0, entry: tuple[str, ...] | None = None, folder: Path | None = None
) -> Iterator[tuple[ServerInfo, ServerKeys]]:
    """A ready server and its keys. Raises ServerError, with the log's decisive lines, if it does not become ready.

    Servers in one `folder` have the same keys, as those of a run. `entry`: the command in SGLang's place.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="server-")))
        spec = ServerSpec(
            index=index,
            config=config.sglang,
            log=folder / f"llm_server-{index}.log",
            keys=ServerKeys.make(folder / "keys"),
            setup_timeout_s=config.rollout.setup_timeout,
            entry=entry,
        )
        thread = LoopThread("server")
        server = SGLangProcess(spec, owners=(os.getpid(),))
        try:
            thread.call(server.start(generation=0, model_path=config.sglang.model_path, weight_version=0))
            yield thread.call(server.wait_ready()), ServerKeys.read_file(spec.keys)
        finally:
            thread.call(server.close())
            thread.close()
