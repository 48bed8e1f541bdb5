"""The same against S3, as an emulator speaks it."""

import os
import shutil

import pytest

from launcher.base.errors import ConfigError
from tests.programs import object_store
from tests.support.remote_machine import Machine
from tests.support.worlds.checkpoints import killed_after, save

pytest.importorskip("moto", reason="the emulator comes with the extra `test`")
pytest.importorskip("s3fs", reason="s3:// comes with the extra `s3`")

URL = "s3://bucket/some/folder"


@pytest.fixture(scope="module")
def s3():
    with object_store.running("bucket") as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


@pytest.fixture
def url(s3, request):
    return f"{URL}/{abs(hash(request.node.name))}"


@pytest.mark.slow
def test_there_and_back_across_a_lost_disk(tmp_path, url):
    machine = Machine(tmp_path / "here", url)
    machine.remote.check()
    for step in range(5):
        save(machine.store, step, keep=step == 0)
        machine.copy()
        machine.store.prune(3)
    machine.copy()
    assert machine.there() == [0, 2, 3, 4]
    shutil.rmtree(tmp_path / "here")
    again = Machine(tmp_path / "here", url)
    fetched = again.fetch()
    assert fetched.global_step == 4
    again.store.verify(fetched)
    again.uploader._set_back_to = 2
    again.store.set_aside_after(2)
    again.copy()
    assert again.there() == [0, 2]


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_nothing_that_is_listed(tmp_path, url):
    machine = Machine(tmp_path / "here", url)
    save(machine.store, 0)
    killed_after(2, tmp_path / "here", url, dict(os.environ))
    assert machine.there() == []
    machine.copy()
    assert machine.there() == [0]


@pytest.mark.slow
def test_one_that_was_cut_is_passed_over_on_the_way_back(tmp_path, url):
    machine = Machine(tmp_path / "here", url)
    save(machine.store, 0)
    one = save(machine.store, 1)
    machine.copy()
    machine.remote._fs.pipe_file(machine.remote._at(one.name, "model.safetensors"), b"cut")
    assert Machine(tmp_path / "elsewhere", url).fetch().global_step == 0


@pytest.mark.slow
def test_a_bucket_that_is_not_there_and_a_secret_that_is_not_told(tmp_path, s3):
    nowhere = Machine(tmp_path / "here", "s3://no-such-bucket/a")
    with pytest.raises(ConfigError, match=r"recover\.url: s3://no-such-bucket/a/exp/t1 can't be written") as caught:
        nowhere.fetch()
    assert object_store.SECRET not in str(caught.value)
