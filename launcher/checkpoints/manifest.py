"""`manifest.json`: marks a folder as a complete checkpoint of ours, and how to verify that it still is (docs/files.md).

It lists every file with its length and SHA-256, so that a torn, flipped or missing one names itself. It is written
last, into a folder that nobody reads yet; a folder without a valid manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from launcher.base.durable import sync_file
from launcher.base.errors import CheckpointError
from launcher.run_files.journal import encode

MANIFEST_NAME = "manifest.json"
KEEP_MARK = ".keep"
"""An empty file beside the manifest: retention leaves this checkpoint alone. Not in the manifest, so that it can be
given and revoked without touching what was hashed."""
FORMAT = "grpo-checkpoint/1"
HASHING_THREADS = 4
PIECE_BYTES = 64 * 2**20
"""A longer file is hashed in pieces of this length: one thread hashes about 1 GB/s, and a state has one large file."""
LEAST_PIECE_BYTES = 2**20
READ_BYTES = 2**20
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint: its length in bytes and the SHA-256 of its content, in hex.

    `piece_bytes`, where it is not 0: `sha256` is that of the SHA-256s of the file's pieces of that length, one after
    another, which are hashed in parallel. Manifests of before have none.
    """

    bytes: int
    sha256: str
    piece_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's contents and where it came from. Field names are the file's own keys.

    `files` maps names relative to the folder, with `/`. `created_at` is in unix seconds. `config_fingerprint`: see
    launcher/config/fingerprint.py. `health`: the reward mean of the last steps, and a verdict
    (UNKNOWN: whoever saved it asked nobody).
    """

    format: str
    global_step: int
    policy_version: int
    created_at: float
    files: Mapping[str, FileRecord]
    config_fingerprint: Mapping[str, str | int]
    health: Mapping[str, object]

    def encode(self) -> bytes:
        content = asdict(self)
        for record in content["files"].values():
            if not record["piece_bytes"]:
                del record["piece_bytes"]
        return encode(content)

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
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a complete manifest: {error!r}", FAULT_HINT) from error

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Of a manifest's own bytes. Raises ValueError, KeyError or TypeError where it is not a complete one."""
        try:
            return cls._of(json.loads(data))
        except (AttributeError, ArithmeticError, RecursionError) as error:  # JSON of another shape, a number beyond all
            raise ValueError(f"{error}") from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Self:
        if data["format"] != FORMAT:
            raise ValueError(f"format is {data['format']!r}, this version reads {FORMAT!r}")
        fields = dict(data)
        fields["files"] = {inside(name): FileRecord(**record) for name, record in data["files"].items()}
        manifest = cls(**fields)
        _check_types(manifest)
        return manifest


def _check_types(manifest: Manifest) -> None:
    """Raises TypeError or ValueError: every later comparison trusts these types."""
    for name in ("global_step", "policy_version"):
        if type(getattr(manifest, name)) is not int:
            raise TypeError(f"{name} is {getattr(manifest, name)!r}, not an integer")
    if not isinstance(manifest.created_at, int | float) or not 0 <= manifest.created_at < NO_DATE:
        raise TypeError(f"created_at is {manifest.created_at!r}, not unix seconds")
    for name in ("config_fingerprint", "health"):
        if not isinstance(getattr(manifest, name), dict):
            raise TypeError(f"{name} is not an object")
    for name, record in manifest.files.items():
        if type(record.bytes) is not int or not isinstance(record.sha256, str):
            raise TypeError(f"the length and SHA-256 of {name} are {record.bytes!r} and {record.sha256!r}")
        pieces = record.piece_bytes
        if type(pieces) is not int or (pieces != 0 and pieces < LEAST_PIECE_BYTES):
            raise ValueError(f"piece_bytes of {name} is {pieces!r}, neither 0 nor {LEAST_PIECE_BYTES} and more")
    if not manifest.files:
        raise ValueError("it lists no files")
    _ = manifest.reward_mean  # it can be said as a number


def inside(name: str) -> str:
    """`name`, which must not lead out of the folder: a manifest comes from disk and is believed in nothing."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"file name {name!r} leads out of the checkpoint")
    return name


def record_files(folder: Path, *, piece_bytes: int = PIECE_BYTES) -> dict[str, FileRecord]:
    """Hash every file below `folder`, longer ones in pieces, and sync each to the disk. Raises CheckpointError where
    there are none, or something else than files."""
    paths = list_files(folder)
    if not paths:
        raise CheckpointError(f"{folder} holds no files", "write the files of a checkpoint before its commit")
    sizes = [path.stat().st_size for path in paths]
    pieces = [piece_bytes if size > piece_bytes else 0 for size in sizes]
    with ThreadPoolExecutor(HASHING_THREADS) as pool:  # hashing and fsync release the interpreter lock
        digests = [_begin_hash(pool, *one) for one in zip(paths, sizes, pieces, strict=True)]
        syncing = [pool.submit(sync_file, path) for path in paths]
        records = [
            FileRecord(bytes=size, sha256=digest(), piece_bytes=piece)
            for size, digest, piece in zip(sizes, digests, pieces, strict=True)
        ]
        for synced in syncing:
            synced.result()
    return dict(zip((path.relative_to(folder).as_posix() for path in paths), records, strict=True))


def _begin_hash(pool: ThreadPoolExecutor, path: Path, size: int, piece_bytes: int) -> Callable[[], str]:
    """Begin to hash a file; what is returned waits for its SHA-256 in hex. Raises OSError then."""
    length = piece_bytes or size
    pieces = [pool.submit(_hash_piece, path, start, length) for start in range(0, size, length)] if size else []
    if piece_bytes:
        return lambda: hashlib.sha256(b"".join(piece.result() for piece in pieces)).hexdigest()
    return lambda: (pieces[0].result() if pieces else hashlib.sha256().digest()).hex()


def _hash_piece(path: Path, start: int, length: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, length)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length > 0 and (count := file.readinto(buffer[:length])):
            digest.update(buffer[:count])
            length -= count
    return digest.digest()


def list_files(folder: Path) -> list[Path]:
    """All files of a checkpoint in the order of their names, without manifest and marks."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is not a plain file", "write the files themselves into a checkpoint")
        if path.is_file() and path.relative_to(folder).as_posix() not in {MANIFEST_NAME, KEEP_MARK}:
            files.append(path)
    return files


def find_faults(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """What differs from the manifest: lengths, which are cheap; where all of them agree, hashes."""
    faults = find_size_faults(folder, files)
    if faults:
        return faults
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        begun = [
            (folder / name, record, _begin_hash(pool, folder / name, record.bytes, record.piece_bytes))
            for name, record in files.items()
        ]
        return list(filter(None, (_hash_fault(*one) for one in begun)))


def find_size_faults(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    faults = []
    for path, record in ((folder / name, record) for name, record in files.items()):
        try:
            size = path.stat().st_size
        except OSError as error:
            faults.append(f"{path} is missing or unreadable: {error.strerror}")
        else:
            if size != record.bytes:
                faults.append(f"{path} has {size} bytes, its manifest says {record.bytes}")
    return faults


def _hash_fault(path: Path, expected: FileRecord, digest: Callable[[], str]) -> str:
    try:
        found = digest()
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"
    if found == expected.sha256:
        return ""
    return f"{path} was changed: its SHA-256 is {found[:12]}…, its manifest says {expected.sha256[:12]}…"
