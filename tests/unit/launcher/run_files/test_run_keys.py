"""The files of a run's secrets: who can read them, what they are like, and what is said where they can't be used."""

import os
import stat
import traceback
from concurrent.futures import ProcessPoolExecutor

import pytest

from launcher.base.errors import StorageError
from launcher.run_files.run_keys import BYTES, SERVERS, ServerKeys, make_ray_token


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_nobody_else_can_read_them_whatever_the_umask(tmp_path, umask):
    folder = tmp_path / "keys" / "ann" / "exp" / "t0"
    files = [ServerKeys.make(folder), make_ray_token(folder)]
    assert [mode(file) for file in files] == [0o600, 0o600]
    assert mode(folder) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["api_key", "ray_token", "servers.json"], "nothing staged"
    assert (folder / "api_key").read_text() == ServerKeys.read(folder).api
    assert mode(folder / "api_key") == 0o600


def test_each_run_has_its_own_and_keeps_them(tmp_path):
    for name in ("one", "two"):
        ServerKeys.make(tmp_path / name)
    one, two = ServerKeys.read(tmp_path / "one"), ServerKeys.read(tmp_path / "two")
    assert len({one.api, one.admin, two.api, two.admin}) == 4
    assert {len(key) for key in (one.api, one.admin)} == {2 * BYTES}
    ServerKeys.make(tmp_path / "one")
    assert ServerKeys.read(tmp_path / "one") == one


@pytest.mark.slow
def test_many_at_once_agree(tmp_path):
    with ProcessPoolExecutor(4) as pool:
        for done in [pool.submit(ServerKeys.make, tmp_path / "keys") for _ in range(16)]:
            done.result()
        found = {(keys.api, keys.admin) for keys in pool.map(ServerKeys.read, [tmp_path / "keys"] * 8)}
    assert len(found) == 1


def test_they_do_not_show_themselves(tmp_path):
    keys = ServerKeys.read_file(ServerKeys.make(tmp_path / "keys"))
    assert keys.api not in repr(keys)
    assert keys.admin not in f"{keys}"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"api": "SECRET"}', '{"api": "", "admin": ""}', "SECRET"])
def test_what_is_no_key_is_not_used_and_not_shown(tmp_path, content):
    path = ServerKeys.make(tmp_path / "keys")
    path.write_text(content)
    with pytest.raises(StorageError, match=r"servers\.json holds") as caught:
        ServerKeys.read(tmp_path / "keys")
    assert "SECRET" not in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "SECRET" not in shown
    assert "servers.json holds" in shown


def test_a_file_that_others_may_read_is_not_used(tmp_path):
    path = ServerKeys.make(tmp_path / "keys")
    path.chmod(0o640)
    with pytest.raises(StorageError, match=r"open to others \(mode 640"):
        ServerKeys.read(tmp_path / "keys")


def test_a_link_is_not_followed(tmp_path):
    ServerKeys.make(tmp_path / "theirs")
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys" / SERVERS).symlink_to(tmp_path / "theirs" / SERVERS)
    with pytest.raises(StorageError, match="can't be read"):
        ServerKeys.make(tmp_path / "keys")


def test_a_folder_behind_a_link_is_not_used(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "keys").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is not a folder of this user's"):
        ServerKeys.make(tmp_path / "keys")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_open_folder_is_closed(tmp_path):
    (tmp_path / "keys").mkdir(mode=0o755)
    ServerKeys.make(tmp_path / "keys")
    assert mode(tmp_path / "keys") == 0o700


def test_without_a_run_there_are_none(tmp_path):
    with pytest.raises(StorageError, match="is not there: the run's keys are made when it starts"):
        ServerKeys.read(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_another_user_has_placed_is_not_used(tmp_path):
    path = ServerKeys.make(tmp_path / "keys")
    os.chown(path, 65534, 65534)
    with pytest.raises(StorageError, match="owner 65534"):
        ServerKeys.read(tmp_path / "keys")
    os.chown(tmp_path / "keys", 65534, 65534)
    with pytest.raises(StorageError, match="is not a folder of this user's"):
        ServerKeys.make(tmp_path / "keys")
