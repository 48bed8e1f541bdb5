"""Reads a log of any size in bounded memory: blocks that end with a complete line, and of each the lines that matter.

The lines are picked by RE2 within Arrow (one automaton for all patterns, some 500 MB/s on one core), so that only
what matters becomes a Python object: Python's own `re` would need a pass of 10 ns a byte for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

BLOCK_BYTES = 8 * 2**20
LONGEST_CARRY = 4 * BLOCK_BYTES
"""A line, or a table, that is longer is cut: it would take its size in memory."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBlock:
    """Some complete lines of a file. `starts[i]` and `ends[i]` bound line i in `data`, without its newline.

    `picked`: numbers of the lines that matter. `first_line`: the number of its first line in the file, from 1.
    """

    data: bytes
    starts: Ints
    ends: Ints
    picked: Ints
    lines: Any
    first_line: int

    def line(self, number: int) -> bytes:
        return self.data[self.starts[number] : self.ends[number]]

    def matching(self, numbers: Ints, pattern: str) -> Ints:
        """Those of the lines `numbers` that have the pattern."""
        if not len(numbers):
            return numbers
        mask = pc.match_substring_regex(self.lines.take(pa.array(numbers)), pattern=pattern)
        found: Ints = numbers[mask.to_numpy(zero_copy_only=False)]
        return found


Hold = Callable[[bytes], int]
"""How many bytes at the end of some lines belong to something that continues behind them."""


def read_blocks(path: Path, pattern: str, hold: Hold) -> Iterator[tuple[LineBlock, int]]:
    """The blocks of a file in order, each with how many bytes are read so far. While one is looked at, the next is read
    and searched: Arrow and the disk need no interpreter.

    What is appended meanwhile is not read: a live log has no end.
    """
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "read-ahead") as ahead:
        blocks = _blocks(file, path.stat().st_size, pattern, hold)
        coming = ahead.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = ahead.submit(next, blocks, None)
            yield block


def _blocks(file: IO[bytes], size: int, pattern: str, hold: Hold) -> Iterator[tuple[LineBlock, int]]:
    carry, done, line_number = b"", 0, 1
    while done < size:
        new = file.read(min(BLOCK_BYTES, size - done))
        if not new:
            return  # truncated while it was read
        done += len(new)
        data = carry + new
        end = len(data)
        if done < size and end <= LONGEST_CARRY:
            end = data.rfind(b"\n") + 1
            end -= hold(data[:end])
        carry = data[end:]
        if end:
            block = _block(data[:end], pattern, line_number)
            line_number += len(block.starts)
            yield block, done


def _block(data: bytes, pattern: str, first_line: int) -> LineBlock:
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1
    offsets = np.append(starts, len(data)).astype(np.int32)
    lines = pa.Array.from_buffers(pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    mask = pc.match_substring_regex(lines, pattern=pattern).to_numpy(zero_copy_only=False)
    picked = np.flatnonzero(mask)
    return LineBlock(data=data, starts=starts, ends=ends, picked=picked, lines=lines, first_line=first_line)
