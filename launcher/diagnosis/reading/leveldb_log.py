"""The container of a `.wandb` file: LevelDB's log format, with a header of WandB's own.

Seven bytes of header (`:W&B`, a magic number, a version), then blocks of 32 KiB. Each piece of a record has a header
of seven bytes (CRC-32, length, kind: 1 whole, 2 first, 3 middle, 4 last) and never crosses a block; the rest of a block
too short for one is padding. Format: github.com/google/leveldb, doc/log_format.md. The checksum is zlib's CRC-32 of
kind and data, as WandB writes it (LevelDB's own is CRC-32C).

A run that was killed leaves a torn end, which ends the reading and is no error; what a damaged piece belongs to is
left out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from launcher.base.errors import DataError

MAGIC = b":W&B"
FILE_HEADER = 7
BLOCK = 32 * 1024
PIECE = struct.Struct("<IHB")
DAMAGED, WHOLE, FIRST, MIDDLE, LAST = 0, 1, 2, 3, 4


def read_records(path: Path) -> Iterator[bytes]:
    """The records up to the end, or to where the file is torn. Raises DataError where it has another beginning."""
    with path.open("rb") as file:
        head = file.read(FILE_HEADER)
        if head[:4] != MAGIC:
            raise DataError(
                f"{path} is not a .wandb file: it begins with {head[:4]!r}, not {MAGIC!r}",
                "give the run-<id>.wandb of an offline-run folder",
            )
        parts, is_open, used = list[bytes](), False, FILE_HEADER
        while block := file.read(BLOCK - used):
            for kind, data in _pieces(block):
                if kind in (WHOLE, FIRST):
                    parts, is_open = [], True
                parts.append(data)
                if kind in (WHOLE, LAST) and is_open:
                    yield b"".join(parts)
                if kind in (WHOLE, LAST, DAMAGED):
                    is_open = False  # what follows without a beginning belongs to what was lost
            used = 0


def _pieces(block: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + PIECE.size <= len(block):
        checksum, length, kind = PIECE.unpack_from(block, position)
        data = block[position + PIECE.size : position + PIECE.size + length]
        if not WHOLE <= kind <= LAST or len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            yield DAMAGED, b""
            return
        yield kind, data
        position += PIECE.size + length
