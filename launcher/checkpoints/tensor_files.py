"""safetensors files without torch: what the header claims, whether the claim is possible, whether numbers are finite.

Format (huggingface.co/docs/safetensors): 8 bytes of the header's length, JSON, then the tensors one after another.
A tensor is read CHUNK bytes at a time, so a folder of any size is looked through in a bounded memory. bfloat16 is
unknown to numpy; a float is not finite where all bits of its exponent are set, which a mask on its bits tells.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from launcher.base.errors import CheckpointError
from launcher.checkpoints.manifest import FAULT_HINT

CHUNK = 8 * 2**20
LONGEST_HEADER = 100_000_000
WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
NO_FLOATS = frozenset({"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"})
EXPONENTS: Mapping[str, tuple[Any, int]] = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
    "F8_E5M2": (np.uint8, 0x7C),
}
"""The bits of the exponent, which are all set in NaN and the infinities alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as the header says: `begin` and `end` are bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """All tensors by name, proven to fill the file. Raises CheckpointError naming the file and what is impossible."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            return _entries(stream, size)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror or error}", FAULT_HINT) from error
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} is no whole safetensors file: {error}", FAULT_HINT) from error


def _entries(stream: BinaryIO, size: int) -> dict[str, TensorEntry]:
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > min(LONGEST_HEADER, size):
        raise ValueError(f"its header claims {length} bytes of {size}")
    header = json.loads(stream.read(length))
    begin = 8 + length
    entries = [_entry(name, facts, begin) for name, facts in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = begin
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f"{entry.name} begins at byte {entry.begin}, what is before it ends at {end}")
        end = entry.end
    if end != size:
        raise ValueError(f"it has {size} bytes, its header says {end}")
    return {entry.name: entry for entry in entries}


def _entry(name: str, facts: Mapping[str, Any], begin: int) -> TensorEntry:
    dtype, shape = str(facts["dtype"]), tuple(int(length) for length in facts["shape"])
    first, last = (int(offset) for offset in facts["data_offsets"])
    width = WIDTHS.get(dtype)
    if width is not None and last - first != math.prod(shape) * width:
        raise ValueError(f"{name} has {last - first} bytes, {dtype} {list(shape)} needs {math.prod(shape) * width}")
    return TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin + first, end=begin + last)


def check_loads(file: Path) -> None:
    """By the library that will load it. Raises CheckpointError."""
    try:
        with safe_open(file, framework="numpy") as opened:
            opened.keys()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} does not load: {error}", FAULT_HINT) from error


def can_judge(dtype: str) -> bool:
    """Is it known which numbers of this type are finite?"""
    return dtype in NO_FLOATS or dtype in EXPONENTS or dtype == "F8_E4M3"


def nonfinite(file: Path, entries: Mapping[str, TensorEntry]) -> list[str]:
    """The names of tensors that hold NaN or an infinity. Raises CheckpointError where the file can't be read."""
    try:
        with file.open("rb", buffering=0) as stream:
            return [entry.name for entry in entries.values() if _has_nonfinite(stream, entry)]
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror or error}", FAULT_HINT) from error


def _has_nonfinite(stream: BinaryIO, entry: TensorEntry) -> bool:
    if entry.dtype == "F8_E4M3":  # it has no infinity, and one NaN of each sign
        return any(bool(((bits & 0x7F) == 0x7F).any()) for bits in _chunks(stream, entry, np.uint8))
    if entry.dtype not in EXPONENTS:
        return False
    kind, mask = EXPONENTS[entry.dtype]
    return any(bool(((bits & kind(mask)) == kind(mask)).any()) for bits in _chunks(stream, entry, kind))


def _chunks(stream: BinaryIO, entry: TensorEntry, kind: Any) -> Iterator[np.ndarray[Any, Any]]:
    stream.seek(entry.begin)
    left = entry.end - entry.begin
    while left:
        data = stream.read(min(CHUNK, left))
        if not data:
            raise OSError(f"it ends within {entry.name}")
        rest = len(data) % np.dtype(kind).itemsize
        if rest:  # a read may end anywhere
            stream.seek(-rest, 1)
            data = data[:-rest]
        left -= len(data)
        yield np.frombuffer(data, dtype=kind)
