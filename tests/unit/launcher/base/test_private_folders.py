"""Folders under names that another user can guess, where everybody may write: who was there first is seen."""

import os

import pytest

from actors.cluster import ray_cluster
from launcher.base.private_folders import could_be_ours, make_private
from launcher.checkpoints import in_memory_checkpoints
from launcher.checkpoints.in_memory_checkpoints import memory_folder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
NOBODY = 65534


def given_to_nobody(folder):
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    return folder


def test_it_is_made_for_this_user_alone(tmp_path):
    for _ in range(2):
        make_private(tmp_path / "mine")
        assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
        (tmp_path / "mine").chmod(0o777)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_not_used(tmp_path, kind):
    folder = tmp_path / "mine"
    folder.touch() if kind == "file" else folder.symlink_to(tmp_path)
    assert not could_be_ours(folder)
    with pytest.raises(PermissionError, match="a file or a link is in its place"):
        make_private(folder)


def test_who_else_may_write_makes_it_anothers(tmp_path):
    folder = tmp_path / "mine"
    assert could_be_ours(folder)
    for mode, is_ours in ((0o755, True), (0o775, False), (0o757, False)):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        assert could_be_ours(folder) is is_ours


@needs_root
def test_anothers_is_not_used(tmp_path):
    folder = given_to_nobody(tmp_path / "mine")
    assert not could_be_ours(folder)
    with pytest.raises(PermissionError, match="somebody else made it"):
        make_private(folder)


@needs_root
@pytest.mark.parametrize("kind", ["weights", "state"])
def test_weights_and_states_go_elsewhere_where_another_user_was_first(paths, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    usual = memory_folder(paths, kind)
    assert usual.parent == tmp_path / "shm"
    given_to_nobody(usual)
    assert memory_folder(paths, kind) == paths.logs / usual.name


@needs_root
def test_rays_folder_is_another_where_another_user_was_first(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    usual = ray_cluster.ray_folder()
    assert usual == tmp_path / f"grpo-ray-{os.geteuid()}" / "ray"
    assert ray_cluster.ray_folder() == usual
    usual.parent.rmdir()
    given_to_nobody(usual.parent)
    other = ray_cluster.ray_folder()
    assert other.parent != usual.parent
    assert other.parent.stat().st_mode & 0o777 == 0o700


def test_no_word_of_the_environment_opens_ray(tmp_path, monkeypatch):
    for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "known"), ("RAY_AUTH_TOKEN_PATH", "/x")):
        monkeypatch.setenv(name, value)
    ray_cluster.lock_with_a_token(tmp_path / "token")
    assert {key: value for key, value in os.environ.items() if key.startswith("RAY_AUTH")} == {
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")
    }
