"""Each flipped byte is found by the one checksum that is written, and by those of manifests of before."""

import hashlib
import json

import pytest

from launcher.base.errors import CheckpointError
from launcher.checkpoints import manifest
from launcher.checkpoints.manifest import MANIFEST_NAME, Manifest, find_faults, record_files

PIECE = 2**10
SIZES = (0, 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 5)
OF_BEFORE = {"format": "grpo-checkpoint/1", "global_step": 3, "policy_version": 4, "created_at": 1.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of lengths around those of pieces."""
    monkeypatch.setattr(manifest, "PIECE_BYTES", PIECE)
    for size in SIZES:
        (tmp_path / f"of_{size}").write_bytes(bytes(i % 251 for i in range(size)))
    return tmp_path


def of_before(path, pieces):
    data = path.read_bytes()
    found = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if pieces and len(data) > PIECE:
        parts = b"".join(hashlib.sha256(data[i : i + PIECE]).digest() for i in range(0, len(data), PIECE))
        found |= {"sha256": hashlib.sha256(parts).hexdigest(), "piece_bytes": PIECE}
    return found


def recorded(folder, by):
    if by == "now":
        return record_files(folder)
    files = {path.name: of_before(path, by == "pieces") for path in folder.iterdir()}
    (folder / MANIFEST_NAME).write_text(
        json.dumps(OF_BEFORE | {"files": files, "config_fingerprint": {}, "health": {}})
    )
    read = Manifest.read(folder)
    assert Manifest.decode(read.encode()) == read, "as it is copied to a URL, in today's form"
    return read.files


@pytest.mark.parametrize("by", ["now", "whole", "pieces"])
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE, 2 * PIECE + 4])
def test_a_flipped_byte_is_found(folder, by, at):
    files = recorded(folder, by)
    assert find_faults(folder, files) == []
    name = f"of_{2 * PIECE + 5}"
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1
    (folder / name).write_bytes(data)
    assert find_faults(folder, files, only_sizes=True) == []
    (fault,) = find_faults(folder, files)
    assert f"{name} was changed" in fault.text


@pytest.mark.parametrize("by", ["now", "whole", "pieces"])
def test_pieces_that_change_places_are_found(folder, by):
    files, path = recorded(folder, by), folder / f"of_{2 * PIECE}"
    data = path.read_bytes()
    path.write_bytes(data[PIECE:] + data[:PIECE])
    assert len(find_faults(folder, files)) == 1


def test_a_manifest_of_before_is_read_and_verified(folder):
    """It has the hash of each whole file, and no length of pieces."""
    files = recorded(folder, "whole")
    (folder / f"of_{2 * PIECE}").write_bytes(b"\xff" * (2 * PIECE))
    assert len(find_faults(folder, files)) == 1


@pytest.mark.parametrize(
    "record",
    [
        {"bytes": 1, "sha256": "0", "piece_bytes": 1},
        {"bytes": 1, "sha256": "0", "piece_bytes": "64"},
        {"bytes": 1, "sha256": "0", "md5": "0"},
        {"bytes": "1", "sha256": "0"},
        {"bytes": 1},
        [],
    ],
)
def test_a_record_of_before_that_was_never_written_is_refused(folder, record):
    data = OF_BEFORE | {"files": {"of_1": record}, "config_fingerprint": {}, "health": {}}
    (folder / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="not a complete manifest"):
        Manifest.read(folder)
