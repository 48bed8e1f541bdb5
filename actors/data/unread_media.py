"""Images, videos and sounds of a data set: no model here is given them, so that records which have them are told."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from actors.data.dataset import DataRecord
from launcher.base.wording import counted

_COLUMN = re.compile(
    r"(multi_?modal(_?(data|inputs?))?|mm_data|pixel_values|"
    r"(\w+_)?(image|img|picture|photo|screenshot|diagram|video|audio|waveform|wav)s?"
    r"(_?(\d+|bytes|paths?|urls?|files?|names?|filenames?|data|base64|b64|list|inputs?|features?))?)",
    re.IGNORECASE,
)
_MARK = re.compile(
    r"<\|?(?:(?:start|end)_of_)?(?:image|img|video|audio|speech|vision)"
    r"(?:[_ -]?(?:\d+|pad|start|end|bos|eos|soft|token|placeholder|here))*\|?>|\[(?:IMG|IMAGE)\]",
    re.IGNORECASE,
)
_FILE = re.compile(
    r"data:(image|audio|video)/\S+|\S+\.(png|jpe?g|gif|webp|bmp|tiff?|wav|mp3|flac|ogg|m4a|mp4|avi|mkv|mov|webm)",
    re.IGNORECASE,
)
_PLACE_OR_DATA = re.compile(r"\S+://\S+|\S*/\S*\w\w\S*|[^\n.]*\.[A-Za-z]\w{1,3}|[\w+/=-]{32,}")
"""Of an image, in a column whose name says so: it may describe one in words as well, or say whether there is one."""
_HEADS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"fLaC", b"ID3", b"OggS")
"""With which files of images and sounds begin."""
_HELD_BY_THE_HUB = ({"bytes", "path"}, {"array", "sampling_rate"})
"""Keys of an image or a sound in a parquet file of `datasets`."""


def media_note(records: Sequence[DataRecord], *, key: str, read: Collection[str | None] = ()) -> str:
    """Which records have what no model is given; "" where none has. `read`: columns that are given as texts."""
    columns, marks = dict[str, int](), dict[str, int]()
    for record in records:
        for column, value in record.record.items():
            if column not in read and _is_media(column, value):
                columns[column] = columns.get(column, 0) + 1
        for mark in dict.fromkeys(_marks_of(record)):
            marks[mark] = marks.get(mark, 0) + 1
    found = [f"{_of(count, records)} have {column!r} beside the text" for column, count in columns.items()]
    found += [f"{_of(count, records)} have {mark} in their text" for mark, count in marks.items()]
    if not found:
        return ""
    if not columns:  # HTML has such tags too
        return (
            f"{key}: {', '.join(found)}: where that stands for an image, a video or a sound, the model is given none; "
            "leave such records out"
        )
    return (
        f"{key}: {', '.join(found)}: only texts are given to the model, no images, videos or sounds; take a data set "
        "of texts, or leave these records out"
    )


def _of(count: int, records: Sequence[DataRecord]) -> str:
    return f"{count} of {counted(len(records), 'record')}"


def _is_media(column: str, value: object) -> bool:
    """By what it holds, under any name; or by the column's name, where it holds neither numbers nor words."""
    if isinstance(value, list | tuple) and value:
        return column.lower() == "pixel_values" or _is_media(column, value[0])
    if isinstance(value, Mapping):
        if any(value.keys() >= keys for keys in _HELD_BY_THE_HUB):
            return any(value.values())  # a row without an image has both, empty
        is_named = _COLUMN.fullmatch(column) is not None
        flat = {str(inner): one for inner, one in value.items() if not isinstance(one, Mapping)}  # schemas are deeper
        return any(_is_media(column if is_named else inner, one) for inner, one in flat.items())
    if not isinstance(value, str | bytes):
        return False
    if isinstance(value, bytes):
        return value.startswith(_HEADS) or (bool(value) and _COLUMN.fullmatch(column) is not None)
    is_place = _PLACE_OR_DATA.fullmatch(value) is not None and _COLUMN.fullmatch(column) is not None
    return is_place or _FILE.fullmatch(value) is not None


def _marks_of(record: DataRecord) -> Iterator[str]:
    for message in record.messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            yield from _MARK.findall(str(part.get("text")))
