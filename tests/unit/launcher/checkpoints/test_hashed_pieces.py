"""Large files of a checkpoint are hashed in pieces: each flipped byte is found, and manifests of before are read."""

import hashlib
import json
import time

import pytest

from launcher.base.errors import CheckpointError
from launcher.checkpoints.manifest import (
    FORMAT,
    LEAST_PIECE_BYTES,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    find_faults,
    record_files,
)

PIECE = LEAST_PIECE_BYTES
SIZES = (0, 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 5)


@pytest.fixture
def folder(tmp_path):
    """Files of lengths around those of pieces."""
    for size in SIZES:
        (tmp_path / f"of_{size}").write_bytes(bytes(i % 251 for i in range(1000)) * (size // 1000 + 1))
        with (tmp_path / f"of_{size}").open("r+b") as file:
            file.truncate(size)
    return tmp_path


def written(folder, files):
    """The manifest, as it is read again."""
    manifest = Manifest(
        format=FORMAT,
        global_step=3,
        policy_version=4,
        created_at=time.time(),
        files=files,
        config_fingerprint={},
        health={},
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    return Manifest.read(folder)


def test_a_long_file_has_the_hash_of_its_pieces_hashes_and_a_short_one_its_own(folder):
    files = record_files(folder, piece_bytes=PIECE)
    for size in SIZES:
        data, record = (folder / f"of_{size}").read_bytes(), files[f"of_{size}"]
        own = hashlib.sha256(data).hexdigest()
        pieces = b"".join(hashlib.sha256(data[i : i + PIECE]).digest() for i in range(0, size, PIECE))
        expected = (hashlib.sha256(pieces).hexdigest(), PIECE) if size > PIECE else (own, 0)
        assert (record.sha256, record.piece_bytes, record.bytes) == (*expected, size)


def test_it_is_written_read_and_verified(folder):
    files = record_files(folder, piece_bytes=PIECE)
    manifest = written(folder, files)
    assert manifest.files == files
    assert find_faults(folder, manifest.files) == []


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE, 2 * PIECE + 4])
def test_a_flipped_byte_in_any_piece_is_found(folder, at):
    files = record_files(folder, piece_bytes=PIECE)
    name = f"of_{2 * PIECE + 5}"
    with (folder / name).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    (fault,) = find_faults(folder, files)
    assert f"{name} was changed" in fault


def test_pieces_that_change_places_are_found(folder):
    files = record_files(folder, piece_bytes=PIECE)
    data = (folder / f"of_{2 * PIECE}").read_bytes()
    assert data[:PIECE] != data[PIECE:]
    (folder / f"of_{2 * PIECE}").write_bytes(data[PIECE:] + data[:PIECE])
    assert len(find_faults(folder, files)) == 1


def test_a_manifest_of_before_is_read_and_verified(folder):
    """It has the hash of each whole file, and no length of pieces."""
    files = {f"of_{size}": hashlib.sha256((folder / f"of_{size}").read_bytes()).hexdigest() for size in SIZES}
    manifest = written(folder, {name: FileRecord(bytes=int(name[3:]), sha256=own) for name, own in files.items()})
    told = json.loads((folder / MANIFEST_NAME).read_bytes())["files"]
    assert told[f"of_{PIECE}"].keys() == {"bytes", "sha256"}, "as it was written"
    assert find_faults(folder, manifest.files) == []
    with (folder / f"of_{2 * PIECE}").open("r+b") as file:
        file.write(b"\xff")
    assert len(find_faults(folder, manifest.files)) == 1


@pytest.mark.parametrize("pieces", [1, -1, True, "64"])
def test_a_length_of_pieces_that_would_take_for_ever_is_refused(folder, pieces):
    files = {"of_1": FileRecord(bytes=1, sha256="", piece_bytes=pieces)}
    with pytest.raises(CheckpointError, match="piece_bytes of of_1"):
        written(folder, files)
