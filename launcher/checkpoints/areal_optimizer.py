"""How many steps the optimizer in AReaL's recover folder (DCP) has made, by its own counters. Nothing is unpickled.

.metadata is a pickle that names, for each tensor, file, offset and length. Its opcodes are read, and only constants are
followed, also those met again through the memo. At each place lies what torch.save wrote: a zip whose parts are stored
as they are. An optimizer's counter is one float32, `….step`, for each parameter.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPTIMIZER, COUNTER = "dcp.optim.", ".step"
STORAGE = "storage_data"
LOCAL_HEADER = struct.Struct("<4s4xH16xHH")
ZIP, STORED, CONTENT = b"PK\x03\x04", 0, b"data/0"
LONGEST = 2**16
"""Bytes of one counter; the zip around its four is about 1,200."""

Constant = str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAt:
    """Where a tensor lies."""

    name: str
    file: str
    offset: int
    length: int


def optimizer_steps(checkpoint: Path, metadata: bytes) -> int | None:
    """Of the parameter with the most; None where there is no counter that can be read."""
    found = []
    for place in _places(metadata):
        if place.name.startswith(OPTIMIZER) and place.name.endswith(COUNTER) and place.length <= LONGEST:
            try:
                with (checkpoint / Path(place.file).name).open("rb") as file:
                    file.seek(place.offset)
                    found.append(_number(file.read(place.length)))
            except OSError:
                return None
    known = [count for count in found if count is not None]
    return max(known, default=None)


def _number(data: bytes) -> int | None:
    """The float32 in a tensor's zip, where that is a count."""
    at = data.find(ZIP)
    while at >= 0 and at + LOCAL_HEADER.size <= len(data):
        _, method, name, extra = LOCAL_HEADER.unpack_from(data, at)
        begin = at + LOCAL_HEADER.size
        content = data[begin + name + extra : begin + name + extra + 4]
        if data[begin : begin + name].endswith(CONTENT) and method == STORED and len(content) == 4:
            (value,) = struct.unpack("<f", content)
            return int(value) if value >= 0 and value == value // 1 else None
        at = data.find(ZIP, at + 1)
    return None


def _places(metadata: bytes) -> Iterator[StoredAt]:
    """`fqn` NAME … `relative_path` FILE `offset` N `length` N, one after another."""
    values = _constants(metadata)
    for value in values:
        if value == STORAGE:
            break
    name = file = ""
    offset: int | None = None
    before: Constant = None
    for value in values:
        if before == "fqn":
            name = str(value)
        elif before == "relative_path":
            file = str(value)
        elif before == "offset" and isinstance(value, int) and file:
            offset = value
        elif before == "length" and isinstance(value, int) and offset is not None:
            yield StoredAt(name=name, file=file, offset=offset, length=value)
            file, offset = "", None
        before = value


def _constants(pickle: bytes) -> Iterator[Constant]:
    """What a pickle puts on its stack, in order, as far as it is text or a number; None for anything else."""
    memo: dict[int, Constant] = {}
    top: Constant = None
    for opcode, argument, _ in pickletools.genops(pickle):
        match opcode.name:
            case "MEMOIZE":
                memo[len(memo)] = top
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[int(argument or 0)] = top
            case "GET" | "BINGET" | "LONG_BINGET":
                top = memo.get(int(argument or 0))
                yield top
            case _:
                top = argument if isinstance(argument, str | int) and not isinstance(argument, bool) else None
                if opcode.name not in ("MARK", "FRAME", "PROTO"):
                    yield top
