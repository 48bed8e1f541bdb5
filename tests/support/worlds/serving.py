"""SGLang's own launcher with a stand-in in its place."""

import asyncio
import contextlib
import os
import sys
from functools import partial

import pytest

from actors.serving.server_incarnation import SHORT, ServerSpec
from actors.serving.sglang_server import SGLangProcess
from launcher.config.schema import SGLangConfig
from launcher.config.supervision import HealthConfig
from launcher.run_files.run_keys import ServerKeys
from tests.support.machine import scaled

ENTRY = (sys.executable, "-m", "tests.programs.stand_in_server")


deadline_s = partial(scaled, 60.0)


@pytest.fixture
def make(tmp_path):
    """Makes a server of the stand-in; `words` are further arguments to it."""

    def make(*words, port=None, setup_timeout_s=None, entry=ENTRY, gpu_ids=(), proof=SHORT, health=None, explain=None):
        config = SGLangConfig(dtype="float32", device="cpu", random_seed=1, port=port)
        spec = ServerSpec(
            index=0,
            config=config,
            log=tmp_path / "llm_server-0.log",
            keys=ServerKeys.make(tmp_path / "keys"),
            setup_timeout_s=setup_timeout_s or deadline_s(),
            entry=(*entry, *words),
            gpu_ids=gpu_ids,
            proof=proof,
            node="n0de0123456789",
            health=health or HealthConfig(),
        )
        return SGLangProcess(spec, owners=(os.getpid(),), explain=explain)

    return make


@contextlib.asynccontextmanager
async def running(server):
    try:
        async with asyncio.timeout(deadline_s()):
            yield
    finally:
        await server.stop()


def start(server, *, generation=0, weight_version=3):
    return server.start(generation=generation, model_path="some/model", weight_version=weight_version)
