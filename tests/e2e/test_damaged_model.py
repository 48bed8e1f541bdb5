"""A model folder that is cut short ends the real SGLang's start with its name."""

import shutil

import pytest

from launcher.base.errors import ServerError
from tests.support.real_server import MODEL, Serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_damaged_model_is_said_by_name(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    broken = Serving(tmp_path)

    async def work(_):
        await broken.server.start(generation=0, model_path=str(folder), weight_version=0)
        await broken.server.wait_ready()

    with pytest.raises(
        ServerError, match=r"did not become ready: it, or a part of it, ended.*SafetensorError"
    ) as caught:
        broken.run(work)
    assert str(broken.log) in caught.value.hint
    broken.run(lambda _: broken.server.close())
    broken.loop.close()
