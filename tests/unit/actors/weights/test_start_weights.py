"""A server that starts keeps its files, whatever the trainer publishes and removes meanwhile."""

import shutil

from actors.weights.start_weights import forget, keep_for
from launcher.base.messages import PublishedWeights


def published(tmp_path, version):
    folder = tmp_path / "weights" / f"v{version}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights %d" % version)
    return PublishedWeights(path=str(folder), version=version, lineage=2)


def test_they_outlive_the_folder_they_came_from(tmp_path):
    weights = published(tmp_path, 4)
    kept = keep_for("server-1", weights)
    shutil.rmtree(tmp_path / "weights")
    assert (kept.version, kept.lineage) == (4, 2)
    assert (tmp_path / "weights.server-1" / "model.safetensors").read_bytes() == b"weights 4"
    assert kept.path == str(tmp_path / "weights.server-1")


def test_the_next_start_takes_the_place_of_the_one_before(tmp_path):
    keep_for("server-1", published(tmp_path, 4))
    keep_for("server-1", published(tmp_path, 5))
    assert (tmp_path / "weights.server-1" / "model.safetensors").read_bytes() == b"weights 5"
    forget("server-1", PublishedWeights(path=str(tmp_path / "weights" / "v5"), version=5, lineage=2))
    assert not (tmp_path / "weights.server-1").exists()


def test_a_folder_that_has_gone_is_none_to_start_from(tmp_path):
    gone = PublishedWeights(path=str(tmp_path / "weights" / "v1"), version=1, lineage=0)
    assert keep_for("server-1", gone) is None
