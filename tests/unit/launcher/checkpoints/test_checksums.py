"""Each flipped byte is found by the one checksum that is written, and by those of manifests of before."""

import hashlib
import json

import pytest
import xxhash

from launcher.base.errors import CheckpointError
from launcher.checkpoints import manifest
from launcher.checkpoints.manifest import (
    MANIFEST_NAME,
    XXH3,
    Manifest,
    WrittenPart,
    find_faults,
    record_files,
    record_of,
)

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


def part_of(path, *stretches):
    data = path.read_bytes()
    checksum = xxhash.xxh3_128(b"".join(data[begin:end] for begin, end in stretches)).hexdigest()
    return WrittenPart(stretches=stretches, checksum=f"{XXH3}:{checksum}")


TWO = [[(0, 10), (20, 600)], [(10, 20), (600, SIZES[-1])]]
UNUSUAL = {
    "alone": [[(0, SIZES[-1])]],
    "two": TWO,
    "one without rows": [*TWO, []],
    "all of it is the first one's": [[(0, SIZES[-1])], []],
}


@pytest.mark.parametrize("at_once", [1, 7, 2**18])
@pytest.mark.parametrize("ranks", UNUSUAL.values(), ids=UNUSUAL)
def test_a_file_that_ranks_wrote_together_has_the_record_of_the_whole(folder, monkeypatch, ranks, at_once):
    monkeypatch.setattr(manifest, "READ_BYTES", at_once)
    path = folder / f"of_{SIZES[-1]}"
    assert record_of(path, [part_of(path, *stretches) for stretches in ranks]) == record_of(path)


@pytest.mark.parametrize(("rank", "at"), [(0, 0), (1, 10), (1, 19), (0, 20), (0, 599), (1, 600), (1, SIZES[-1] - 1)])
def test_bytes_that_are_not_what_a_rank_wrote_name_the_rank_and_the_file(folder, rank, at):
    path = folder / f"of_{SIZES[-1]}"
    parts = [part_of(path, *stretches) for stretches in TWO]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match=f"what trainer rank {rank} wrote is not in {path}; "):
        record_of(path, parts)
    with pytest.raises(OSError, match=f"what trainer rank {rank} wrote is not in {path}; "):
        record_files(folder, {path.name: parts})


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        ([[(0, 10)], [(12, SIZES[-1])]], "no trainer rank wrote bytes 10 to 12 of"),
        ([[(5, SIZES[-1])], []], "no trainer rank wrote bytes 0 to 5 of"),
        ([[(0, 12)], [(10, SIZES[-1])]], "two trainer ranks wrote bytes 10 to 12 of"),
        ([[(0, 10)], [(10, 20)]], f"has {SIZES[-1]} bytes, and 20 were written"),
    ],
)
def test_places_that_do_not_make_up_the_file_are_named(folder, ranks, what):
    path = folder / f"of_{SIZES[-1]}"
    with pytest.raises(OSError, match=what):
        record_of(path, [part_of(path, *stretches) for stretches in ranks])


def test_a_file_that_was_written_and_is_cut_or_gone_is_named(folder):
    path = folder / f"of_{SIZES[-1]}"
    parts = [part_of(path, *stretches) for stretches in TWO]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="trainer rank 1 wrote is not in"):
        record_of(path, parts)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {path.name}, which was written"):
        record_files(folder, {path.name: parts})
