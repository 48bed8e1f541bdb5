"""`manifest.json`: marks a folder as a complete checkpoint of ours, and how to verify that it still is (docs/files.md).

It lists every file with its length and checksum, so that a torn, flipped or missing one names itself. It is written
last, into a folder that nobody reads yet; a folder without a valid manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self

import msgspec
import xxhash

from launcher.base.durable import sync_file
from launcher.base.errors import CheckpointError
from launcher.run_files.journal import encode

MANIFEST_NAME = "manifest.json"
KEEP_MARK = ".keep"
"""An empty file beside the manifest: retention leaves this checkpoint alone. Not in the manifest, so that it can be
given and revoked without touching what was hashed."""
FORMAT = "grpo-checkpoint/2"
FORMAT_OF_BEFORE = "grpo-checkpoint/1"
"""Its files have a `sha256`: of the whole file, or of the SHA-256s of its pieces of PIECE_BYTES."""
PIECE_BYTES = 64 * 2**20
READ_BYTES = 2**18
"""Of a file at a time: it is hashed twice while it is in the processor's cache."""
XXH3, SHA256, SHA256_OF_PIECES, CRC32 = "xxh3_128", "sha256", "sha256_of_pieces", "crc32"
"""Kinds of checksums. XXH3 is written; a thread takes about 2 GB/s of it, a third of that of SHA-256. CRC32 was that of
states in memory. It is to find what a disk has damaged: who could forge a file could forge the manifest too."""
HASHING_THREADS = 4
"""Files at a time: hashing and fsync release the interpreter lock."""
NO_DATE = 1e11
"""Unix seconds of the year 5138: what is later, or no number, is no date."""

FAULT_HINT = "use an older checkpoint: recover.mode=auto passes this one over"


# Files of a checkpoint beside the Hugging Face model folder.
STATE_FORMAT = "grpo-training-state/1"
FACTS_FILE = "training_state.json"
TENSORS_FILE = "training_state.tensors"
"""safetensors under another ending: SGLang loads every `*.safetensors` of a folder as weights of the model."""
POSITION_FILE = "position.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter/adapter_model.safetensors"
"""With actor.use_lora: the adapters, as PEFT stores them. In a folder of their own, since SGLang takes each
`*.safetensors` beside a model for weights of it."""
ADAPTER = "default"
"""PEFT's name of the adapters in a model, which its files leave out."""
MASTER = "master."
MOMENTS = ("exp_avg", "exp_avg_sq")
RANDOM_STATE = "random.torch"


def learned_name(stored: str) -> str:
    """The parameter that a tensor of ADAPTER_FILE is."""
    return re.sub(r"\.(lora_[AB])\.", rf".\1.{ADAPTER}.", stored.removeprefix("base_model.model."))


def stored_name(learned: str) -> str:
    """The inverse."""
    return f"base_model.model.{learned.replace(f'.{ADAPTER}.', '.')}"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint: its length in bytes and `<kind>:<hex>` of its content."""

    bytes: int
    checksum: str

    def __post_init__(self) -> None:
        if self.kind not in (XXH3, SHA256, SHA256_OF_PIECES, CRC32):
            raise ValueError(f"{self.checksum!r} is no checksum that this version knows")

    @property
    def kind(self) -> str:
        return self.checksum.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """What one trainer rank has written of a file: from which byte to which, in order, and one checksum of it all."""

    stretches: Sequence[tuple[int, int]]
    checksum: str

    @property
    def as_file(self) -> FileRecord:
        """The file's, where this rank has written all of it."""
        return FileRecord(bytes=self.stretches[-1][1], checksum=self.checksum)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint's contents and where it came from. Field names are the file's own keys.

    `files` maps names relative to the folder, with `/`. `created_at` is in unix seconds. `config_fingerprint`: see
    launcher/config/fingerprint.py. `health`: the reward mean of the last steps, and a verdict
    (UNKNOWN: whoever saved it asked nobody).
    """

    format: str
    global_step: int
    policy_version: int
    created_at: Annotated[float, msgspec.Meta(ge=0, lt=NO_DATE)]
    files: Annotated[Mapping[str, FileRecord], msgspec.Meta(min_length=1)]
    config_fingerprint: Mapping[str, str | int]
    health: Mapping[str, object]

    def encode(self) -> bytes:
        return encode(msgspec.to_builtins(self))

    @property
    def total_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    @property
    def reward_mean(self) -> float | None:
        """Of the last steps before the save; None where it does not say."""
        reward = self.health.get("reward_mean")
        return float(reward) if isinstance(reward, int | float) else None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a folder. Raises CheckpointError naming the folder, and what is wrong with the manifest."""
        path = folder / MANIFEST_NAME
        try:
            return cls.decode(path.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} has no {MANIFEST_NAME}", FAULT_HINT) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a complete manifest: {error}", FAULT_HINT) from error

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Of a manifest's own bytes. Raises ValueError where it is not a complete one."""
        try:
            manifest = msgspec.convert(_as_now(msgspec.json.decode(data)), cls)
            for name in manifest.files:
                inside(name)
            _ = manifest.reward_mean  # it can be said as a number
        except (msgspec.MsgspecError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{error}") from error
        return manifest


def _as_now(data: Any) -> Any:
    """A manifest of the form before in today's. Raises ValueError where it is of neither."""
    if not isinstance(data, dict) or data.get("format") not in (FORMAT, FORMAT_OF_BEFORE):
        found = data.get("format") if isinstance(data, dict) else None
        raise ValueError(f"format is {found!r}, this version reads {FORMAT!r} and {FORMAT_OF_BEFORE!r}")
    if data["format"] == FORMAT or not isinstance(data.get("files"), dict):
        return data
    return data | {"format": FORMAT, "files": {name: _record_as_now(one) for name, one in data["files"].items()}}


def _record_as_now(record: Any) -> Any:
    if not isinstance(record, dict) or record.keys() - {"bytes", "sha256", "piece_bytes"} or "sha256" not in record:
        raise ValueError(f"{record!r} is no record of a file")
    pieces = record.get("piece_bytes", 0)
    if pieces not in (0, PIECE_BYTES):
        raise ValueError(f"piece_bytes is {pieces!r}, neither 0 nor {PIECE_BYTES}")
    kind = SHA256_OF_PIECES if pieces else SHA256
    return {"bytes": record.get("bytes"), "checksum": f"{kind}:{record['sha256']}"}


def inside(name: str) -> str:
    """`name`, which must not lead out of the folder: a manifest comes from disk and is believed in nothing."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"file name {name!r} leads out of the checkpoint")
    return name


def checksum_of(path: Path, kind: str = XXH3) -> str:
    """Raises OSError."""
    with path.open("rb", buffering=0) as file:
        if kind in (XXH3, SHA256):
            digest = hashlib.file_digest(file, xxhash.xxh3_128 if kind == XXH3 else hashlib.sha256)
            return f"{kind}:{digest.hexdigest()}"
        crc, pieces = 0, hashlib.sha256()
        while piece := file.read(PIECE_BYTES):
            if kind == CRC32:
                crc = zlib.crc32(piece, crc)
            else:
                pieces.update(hashlib.sha256(piece).digest())
        return f"{kind}:{crc:08x}" if kind == CRC32 else f"{kind}:{pieces.hexdigest()}"


def record_files(folder: Path, written: Mapping[str, Sequence[WrittenPart]] | None = None) -> dict[str, FileRecord]:
    """Record every file below `folder`, and sync each to the disk. `written`: see `record_of`, by their names. Raises
    OSError; CheckpointError where there are none, or something else than files."""
    paths = list_files(folder)
    if not paths:
        raise CheckpointError(f"{folder} holds no files", "write the files of a checkpoint before its commit")
    names = [path.relative_to(folder).as_posix() for path in paths]
    written = written or {}
    if lacking := sorted(written.keys() - set(names)):
        raise CheckpointError(f"{folder} lacks {lacking[0]}, which was written", "see that nobody removes its files")
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        records = list(pool.map(_synced_record, paths, (written.get(name, ()) for name in names)))
    return dict(zip(names, records, strict=True))


def record_of(path: Path, parts: Sequence[WrittenPart] = ()) -> FileRecord:
    """`parts`: what the trainer's ranks have written of it, rank 0's first. Raises OSError, also where one of these is
    not there: a rank may see another folder under that path, and what lay there before is no part of the state."""
    if not parts:
        return FileRecord(bytes=path.stat().st_size, checksum=checksum_of(path))
    whole, of_ranks, at = xxhash.xxh3_128(), [xxhash.xxh3_128() for _ in parts], 0
    with path.open("rb", buffering=0) as file:
        for begin, end, rank in sorted((*place, rank) for rank, part in enumerate(parts) for place in part.stretches):
            if begin != at:
                who = "no trainer rank" if begin > at else "two trainer ranks"
                raise OSError(f"{who} wrote bytes {min(at, begin)} to {max(at, begin)} of {path}")
            for data in _read(file, end - begin):
                whole.update(data)
                of_ranks[rank].update(data)
            at = end
        size = file.seek(0, os.SEEK_END)
    for rank, (part, found) in enumerate(zip(parts, of_ranks, strict=True)):
        if part.checksum != f"{XXH3}:{found.hexdigest()}":
            raise OSError(f"what trainer rank {rank} wrote is not in {path}; has its node the same folder there?")
    if size != at:
        raise OSError(f"{path} has {size} bytes, and {at} were written")
    return FileRecord(bytes=size, checksum=f"{XXH3}:{whole.hexdigest()}")


def _read(file: FileIO, size: int) -> Iterator[memoryview]:
    """The next `size` bytes, or those up to the file's end. Each piece is valid until the next one is asked for."""
    piece = memoryview(bytearray(min(size, READ_BYTES)))
    while size and (count := file.readinto(piece[: min(size, READ_BYTES)])):
        yield piece[:count]
        size -= count


def _synced_record(path: Path, parts: Sequence[WrittenPart]) -> FileRecord:
    record = record_of(path, parts)
    sync_file(path)
    return record


def list_files(folder: Path) -> list[Path]:
    """All files of a checkpoint in the order of their names, without manifest and marks."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is not a plain file", "write the files themselves into a checkpoint")
        if path.is_file() and path.relative_to(folder).as_posix() not in {MANIFEST_NAME, KEEP_MARK}:
            files.append(path)
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Of one file, named in `text`. `is_unread`: it is there, and can't be read now; else it is not what it was."""

    text: str
    is_unread: bool = False


def find_faults(folder: Path, files: Mapping[str, FileRecord], *, only_sizes: bool = False) -> list[Fault]:
    """What differs from the manifest: lengths, which are cheap; where all of them agree, checksums."""
    places = [(folder / name, record) for name, record in files.items()]
    faults = [fault for place in places if (fault := _size_fault(*place)) is not None]
    if faults or only_sizes:
        return faults
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return [fault for fault in pool.map(lambda place: _content_fault(*place), places) if fault is not None]


def _size_fault(path: Path, expected: FileRecord) -> Fault | None:
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return Fault(text=f"{path} is missing")
    except OSError as error:
        return Fault(text=f"{path} can't be read: {error.strerror or error}", is_unread=True)
    if size == expected.bytes:
        return None
    return Fault(text=f"{path} has {size} bytes, its manifest says {expected.bytes}")


def _content_fault(path: Path, expected: FileRecord) -> Fault | None:
    try:
        found = checksum_of(path, expected.kind)
    except FileNotFoundError:
        return Fault(text=f"{path} is missing")
    except OSError as error:
        return Fault(text=f"{path} can't be read: {error.strerror or error}", is_unread=True)
    if found == expected.checksum:
        return None
    return Fault(text=f"{path} was changed: its checksum is {found}, its manifest says {expected.checksum}")
