"""Reads TensorBoard's event files: scalars by their tags, as AReaL, TRL and others write them.

tensorboardX has the messages, and no reader: a file is records of a length (8 bytes), its checksum (4), an `Event`
message, its checksum (4). What can't be parsed ends the reading, as does the torn end that a killed run leaves.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from launcher.base.errors import DataError
from launcher.diagnosis.reading.log_records import TENSORBOARD, Contents, FigureNames
from launcher.diagnosis.reading.unpacked import PackedError
from launcher.diagnosis.reading.wandb_files import Row, contents_of, steps_of

LENGTH, CHECKSUM = struct.Struct("<Q"), 4
LONGEST = 2**30
"""Bytes of a record; images are the largest that are written."""
VERSION = b"brain.Event:"
"""In the first record of each file."""
CONTENT = {1: "<f4", 2: "<f8"}
"""Of a tensor's bytes, by its dtype."""


def is_event_file(path: Path, head: bytes) -> bool:
    return VERSION in head[:64] or ".tfevents." in path.name


def read_event_file(path: Path, names: FigureNames) -> Contents:
    """Raises DataError where it is no event file, or has no scalar."""
    keys: set[str] = set()
    rows = list(_rows(path, keys))
    if not keys:
        raise DataError(f"{path} holds no scalar", "give the event file that the training's figures are in")
    return contents_of(
        path, TENSORBOARD, steps_of(rows, names), keys, times=[at for _, at, _ in rows if at is not None]
    )


def _rows(path: Path, keys: set[str]) -> Iterator[Row]:
    try:
        from tensorboardX.proto.event_pb2 import Event  # two seconds, and only here
    except ImportError as error:
        raise PackedError(
            f"{path} is TensorBoard's, and tensorboardX, which reads it, is not installed",
            'pip install -c constraints.txt -e ".[tensorboard]"',
        ) from error
    for data in _records(path):
        event = Event()
        try:
            event.ParseFromString(data)
        except DecodeError:
            return
        values = {one.tag: value for one in event.summary.value if math.isfinite(value := _number(one))}
        if values:
            keys.update(values)
            yield event.step, event.wall_time if event.wall_time > 0 else None, values


def _records(path: Path) -> Iterator[bytes]:
    """Up to where it is torn."""
    with path.open("rb") as file:
        while len(head := file.read(LENGTH.size + CHECKSUM)) == LENGTH.size + CHECKSUM:
            (length,) = LENGTH.unpack_from(head)
            data = file.read(length) if length <= LONGEST else b""
            if len(data) < length or length > LONGEST or len(file.read(CHECKSUM)) < CHECKSUM:
                return
            yield data


def _number(value: Any) -> float:
    """A scalar; NaN for anything else, such as a histogram or a text."""
    if not value.HasField("tensor"):
        return float(value.simple_value) if value.HasField("simple_value") else math.nan
    tensor = value.tensor
    numbers = [*tensor.float_val, *tensor.double_val]
    if not numbers and tensor.dtype in CONTENT and len(tensor.tensor_content) <= 8:
        numbers = np.frombuffer(tensor.tensor_content, CONTENT[tensor.dtype]).tolist()
    return float(numbers[0]) if len(numbers) == 1 else math.nan
