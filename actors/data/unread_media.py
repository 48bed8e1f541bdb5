"""Images, videos and sounds of a data set: no model here is given them, so that records which have them are told."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from actors.data.dataset import DataRecord
from launcher.base.wording import counted

_COLUMN = re.compile(
    r"multi_?modal(_?(data|inputs?))?|pixel_values|"
    r"(image|img|picture|photo|screenshot|figure|diagram|frame|video|audio|sound|speech|waveform)s?"
    r"(_?(\d+|bytes|paths?|urls?|files?|data|base64|b64|list|inputs?))?",
    re.IGNORECASE,
)
_MARK = re.compile(
    r"<\|?(?:image|img|video|audio|speech|vision)(?:[_-]?(?:\d+|pad|start|end|token|placeholder|here))*\|?>|\[IMG\]",
    re.IGNORECASE,
)
_HELD_BY_THE_HUB = {"bytes", "path"}
"""Keys of an image or a sound in a parquet file of `datasets`."""


def media_note(records: Sequence[DataRecord], *, key: str) -> str:
    """Which records have what no model is given; "" where none has."""
    columns, marks = dict[str, int](), dict[str, int]()
    for record in records:
        for column, value in record.record.items():
            if _is_media(column, value):
                columns[column] = columns.get(column, 0) + 1
        for mark in set(_marks_of(record)):
            marks[mark] = marks.get(mark, 0) + 1
    found = [f"{_of(count, records)} have {column!r} beside the text" for column, count in columns.items()]
    found += [f"{_of(count, records)} have {mark} in their text" for mark, count in marks.items()]
    if not found:
        return ""
    return (
        f"{key}: {', '.join(found)}: only texts are given to the model, no images, videos or sounds; take a data set "
        "of texts, or leave these records out"
    )


def _of(count: int, records: Sequence[DataRecord]) -> str:
    return f"{count} of {counted(len(records), 'record')}"


def _is_media(column: str, value: object) -> bool:
    """By the column's name, where it holds anything but a number; or by what it holds, under any name."""
    if isinstance(value, list | tuple) and value:
        return _is_media(column, value[0])
    if isinstance(value, Mapping) and value.keys() >= _HELD_BY_THE_HUB:
        return True
    return _COLUMN.fullmatch(column) is not None and isinstance(value, str | bytes | Mapping) and bool(value)


def _marks_of(record: DataRecord) -> Iterator[str]:
    for message in record.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            yield from _MARK.findall(str(part.get("text")))
