"""Incarnations as forks of one host, with the stand-in as the server: real processes."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from functools import partial

import pytest

from actors.processes.process_tree import bearing, identify
from actors.serving.server_incarnation import ServerHost, ServerSpec
from actors.serving.sglang_server import SGLangProcess
from launcher.base.errors import ServerError
from launcher.base.messages import ServerState
from launcher.config.schema import SGLangConfig
from launcher.run_files.run_keys import ServerKeys
from tests.support.machine import scaled

ENTRY = (sys.executable, "-m", "tests.programs.forked_program", "tests.programs.stand_in_server")
deadline_s = partial(scaled, 120.0)

pytestmark = pytest.mark.slow


class Forked:
    """A server, and the host that forks it now."""

    def __init__(self, folder):
        self.log = folder / "llm_server-0.log"
        self.model = folder / "model"
        self.model.mkdir()
        self.is_of("Qwen2ForCausalLM")
        config = SGLangConfig(dtype="float32", device="cpu", random_seed=1)
        spec = ServerSpec(
            index=0,
            config=config,
            log=self.log,
            keys=ServerKeys.make(folder / "keys"),
            setup_timeout_s=deadline_s(),
            entry=ENTRY,
        )
        self.source = ServerHost(ENTRY, within_s=deadline_s())
        self.server = SGLangProcess(spec, owners=(os.getpid(),), host=self.source)

    def is_of(self, architecture):
        (self.model / "config.json").write_text(json.dumps({"architectures": [architecture], "vocab_size": 8}))

    @property
    def host(self):
        return self.source._host._identity if self.source._host and self.source._forks else None

    async def begin(self, generation):
        return await self.server.start(generation=generation, model_path=str(self.model), weight_version=3)

    async def serve(self, generation):
        await self.begin(generation)
        return await self.server.wait_ready()

    async def lose(self):
        os.kill(self.server.info().pid, signal.SIGKILL)
        await self.server.wait_exit()

    @contextlib.asynccontextmanager
    async def running(self):
        try:
            async with asyncio.timeout(deadline_s()):
                yield
        finally:
            await self.server.close()
        assert bearing(f"GRPO_SERVER_LOG={self.log}") == []


@pytest.fixture
def forked(tmp_path):
    return Forked(tmp_path)


async def test_later_lives_are_forked_of_the_same_host(forked, monkeypatch, tmp_path):
    monkeypatch.setenv("IMPORTS", str(tmp_path / "may end"))
    async with forked.running():
        starting = await forked.begin(0)
        assert (starting.state, starting.pid) == (ServerState.STARTING, None), "it imports yet"
        (tmp_path / "may end").touch()
        first = await forked.server.wait_ready()
        host = forked.host
        await forked.lose()
        assert (await forked.begin(1)).pid is not None
        second = await forked.server.wait_ready()
        assert (first.generation, second.generation, second.state) == (0, 1, ServerState.READY)
        assert first.pid != second.pid
        assert forked.host == host == identify(host.pid)
    assert forked.log.read_text().count(": host: ") == 1


async def test_a_lost_host_is_made_anew_and_so_is_one_for_another_model(forked):
    async with forked.running():
        await forked.serve(0)
        first = forked.host
        os.kill(first.pid, signal.SIGKILL)
        assert "was killed" in (await forked.server.wait_exit()).reason
        await forked.serve(1)
        second = forked.host
        await forked.lose()
        forked.is_of("LlamaForCausalLM")
        await forked.serve(2)
        assert len({first, second, forked.host}) == 3
        assert identify(second.pid) != second
    assert "a new host: it is gone" in forked.log.read_text()
    assert "a new host: it was made for ['Qwen2ForCausalLM'], not ['LlamaForCausalLM']" in forked.log.read_text()


async def test_where_the_host_does_not_answer_the_server_is_run(forked, monkeypatch):
    async with forked.running():
        await forked.serve(0)
        await forked.lose()
        await (await asyncio.shield(forked.server._launch)).end()
        monkeypatch.setattr("actors.processes.hosted_process.ANSWER_S", 0.5)
        monkeypatch.setattr(forked.source._host, "send", lambda order: None)
        assert (await forked.serve(1)).state is ServerState.READY
        assert forked.host is None
    assert "run as a program: its host did not answer within 0.5 s" in forked.log.read_text()


async def test_where_a_host_can_not_fork_the_server_is_run(forked, monkeypatch):
    monkeypatch.setenv("THREAD", "1")
    async with forked.running():
        assert (await forked.serve(0)).state is ServerState.READY
        assert forked.host is None
        await forked.lose()
        assert (await forked.serve(1)).state is ServerState.READY
    assert "its host has 2 threads, and can't be forked" in forked.log.read_text()
    assert forked.log.read_text().count(": host: ") == 1, "it is not tried again at once"


async def test_a_stop_does_not_wait_for_the_imports(forked, monkeypatch, tmp_path):
    monkeypatch.setenv("IMPORTS", str(tmp_path / "may end"))
    async with forked.running():
        await forked.begin(0)
        host = forked.host
        assert (await forked.server.stop()).info.state is ServerState.STOPPED
        with pytest.raises(ServerError, match="it was stopped while its host imported"):
            await forked.server.wait_ready()
        (tmp_path / "may end").touch()
        assert (await forked.serve(1)).state is ServerState.READY
        assert forked.host == host
