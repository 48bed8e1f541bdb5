"""A log of any size, in bounded memory: blocks that end with a whole line, and of each the lines that matter.

The lines are picked by RE2 within Arrow (one automaton for all the words, some 500 MB/s on one core), so that only
what matters becomes a Python object: Python's own `re` would need a pass of 10 ns a byte for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from launcher.errors import StorageError

BLOCK_BYTES = 8 * 2**20
LONGEST_CARRY = 4 * BLOCK_BYTES
"""A line, or a table, that is longer is cut: it would take its size in memory."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some whole lines of a file. `starts[i]` and `ends[i]` bound line i in `data`, without its newline.

    `picked`: numbers of the lines that matter. `first_line`: the number of its first line in the file, from 1.
    """

    data: bytes
    starts: Ints
    ends: Ints
    picked: Ints
    lines: Any
    first_line: int
    is_last: bool

    def line(self, number: int) -> bytes:
        return self.data[self.starts[number] : self.ends[number]]

    def matching(self, numbers: Ints, pattern: str) -> Ints:
        """Those of the lines `numbers` that have the pattern."""
        if not len(numbers):
            return numbers
        mask = pc.match_substring_regex(self.lines.take(pa.array(numbers)), pattern=pattern)
        found: Ints = numbers[mask.to_numpy(zero_copy_only=False)]
        return found


Keep = Callable[[Block], int]
"""Takes a block and answers how many of its bytes, at its end, it wants to see again before those that follow."""


def read_blocks(path: Path, pattern: str, use: Keep, *, said: Callable[[int], None] = lambda done: None) -> int:
    """Give each block of the file to `use`; the file's length in bytes. `said` is told how far it is, in bytes.

    Raises StorageError where it can't be read. What is appended meanwhile is read up to the length it had at first:
    a live log has no end.
    """
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            for piece in _pieces(file, size, use, pattern):
                said(piece)
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}", "check its permissions") from error
    return size


def _pieces(file: Any, size: int, use: Keep, pattern: str) -> Iterator[int]:
    carry, done, line_number = b"", 0, 1
    while done < size:
        new = file.read(min(BLOCK_BYTES, size - done))
        if not new:
            break  # truncated while it was read
        done += len(new)
        data = carry + new
        is_last = done >= size
        end = len(data) if is_last or len(data) > LONGEST_CARRY else data.rfind(b"\n") + 1
        if end == 0:
            carry = data
            continue
        block = _block(data[:end], pattern, line_number, is_last=is_last)
        wanted = min(use(block), end if len(data) <= LONGEST_CARRY else 0)
        carry = data[end - wanted :]
        line_number += len(block.starts) - block.data.count(b"\n", end - wanted)
        yield done


def _block(data: bytes, pattern: str, first_line: int, *, is_last: bool) -> Block:
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1
    offsets = np.append(starts, len(data)).astype(np.int32)
    lines = pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    mask = pc.match_substring_regex(lines, pattern=pattern).to_numpy(zero_copy_only=False)
    return Block(
        data=data,
        starts=starts,
        ends=ends,
        picked=np.flatnonzero(mask),
        lines=lines,
        first_line=first_line,
        is_last=is_last,
    )
