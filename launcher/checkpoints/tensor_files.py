"""Reads safetensors files without torch: their tensors' names and shapes, and which hold no possible weights.

The library reads the header; the tensors lie one after another in the order of their offsets, up to the file's end. A
tensor is read CHUNK bytes at a time, so a folder of any size is looked through in a bounded memory. bfloat16 is
unknown to numpy; a float is not finite where all bits of its exponent are set, which a mask on its bits finds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from launcher.base.errors import ModelError

CHUNK = 4 * 2**20
PEEKED = 512
"""Bytes of a matrix that show already that it is not one number."""
NO_FLOATS = frozenset({"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"})
NOT_COVERED = "file not fully covered"
"""The library's words where the file's length is not what its header says."""
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
    """One tensor as the header describes it: `begin` and `end` are bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """All tensors by name, after safetensors found the file consistent. Raises ModelError naming the file."""
    found: dict[str, TensorEntry] = {}
    try:
        with safe_open(file, framework="numpy") as opened:
            end = file.stat().st_size  # the library refuses a file with anything before, between or behind its tensors
            for name in reversed(opened.offset_keys()):
                stored = opened.get_slice(name)
                shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                begin = end - math.prod(shape) * _bits(dtype) // 8
                found[name] = TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end)
                end = begin
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror or error}", "check the path and its rights") from error
    except SafetensorError as error:
        is_cut = NOT_COVERED in str(error)
        what = "is truncated, or has more than its header names" if is_cut else "is not a complete safetensors file"
        raise ModelError(f"{file} {what}: {error}", "copy or download it again") from error
    return dict(reversed(found.items()))


def _bits(dtype: str) -> int:
    """Of one number: BF16, F8_E4M3, U32 and all others but BOOL have it in their names."""
    named = re.search(r"\d+", dtype)
    return int(named[0]) if named else 8


def can_judge(dtype: str) -> bool:
    """Is it known which numbers of this type are finite?"""
    return dtype in NO_FLOATS or dtype in EXPONENTS or dtype == "F8_E4M3"


def nonfinite(file: Path, entries: Mapping[str, TensorEntry]) -> list[str]:
    """The names of tensors that hold NaN or an infinity. Raises OSError."""
    with file.open("rb") as stream:
        return [entry.name for entry in entries.values() if _has_nonfinite(stream, entry)]


def constant_matrices(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, bool]:
    """The names of matrices whose numbers are all the same, each with whether that is 0. Raises OSError.

    No training makes such a one. A bias may well be 0, and a norm's scale 1.
    """
    found = {}
    with file.open("rb") as stream:
        for entry in entries.values():
            if len(entry.shape) >= 2 and entry.dtype in EXPONENTS and math.prod(entry.shape) > 1:
                value = _only_value(stream, entry)
                if value is not None:
                    found[entry.name] = value == 0
    return found


def _only_value(stream: BinaryIO, entry: TensorEntry) -> int | None:
    """The bits of the number that all are; None where there are others. 0 and -0 are one number."""
    kind, _ = EXPONENTS[entry.dtype]
    sign = kind(1 << (8 * np.dtype(kind).itemsize - 1))
    first: int | None = None
    stream.seek(entry.begin)
    begin = np.frombuffer(stream.read(min(PEEKED, entry.end - entry.begin)), dtype=kind)
    if len({0 if bits == int(sign) else bits for bits in begin.tolist()}) > 1:
        return None  # nearly always: the rest need not be read
    for bits in chunks(stream, entry, kind):
        first = int(bits[0]) if first is None else first
        first = 0 if first == int(sign) else first
        same = (bits & ~sign) == 0 if first == 0 else bits == first
        if not same.all():
            return None
    return first


def _has_nonfinite(stream: BinaryIO, entry: TensorEntry) -> bool:
    if entry.dtype == "F8_E4M3":  # it has no infinity, and one NaN of each sign
        return any(bool(((bits & 0x7F) == 0x7F).any()) for bits in chunks(stream, entry, np.uint8))
    if entry.dtype not in EXPONENTS:
        return False
    kind, mask = EXPONENTS[entry.dtype]
    return any(bool(((bits & kind(mask)) == kind(mask)).any()) for bits in chunks(stream, entry, kind))


def chunks(
    stream: BinaryIO, entry: TensorEntry, kind: Any, *, most: int | None = None
) -> Iterator[np.ndarray[Any, Any]]:
    """A tensor's numbers as they lie there, CHUNK bytes at a time. `most`: so many, from its middle. Raises OSError."""
    width = np.dtype(kind).itemsize
    count = (entry.end - entry.begin) // width
    taken = count if most is None else min(count, most)
    stream.seek(entry.begin + (count - taken) // 2 * width)
    for left in range(taken, 0, -(CHUNK // width)):
        size = min(CHUNK // width, left) * width
        data = stream.read(size)
        if len(data) < size:
            raise OSError(f"it ends within {entry.name}")
        yield np.frombuffer(data, dtype=kind)
