"""Reads records from JSON lines, a JSON list, parquet, Arrow, CSV, a folder of those, or the Hugging Face hub.

Files are streamed: a few records are in memory at a time, and reading stops when the caller has enough. Each source
yields (where, fields); `where` names file and line or row. A line that is no record has a DataError in place of its
fields, so that others can still be read; what makes the rest of a file unreadable raises DataError.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from launcher.base.errors import DataError
from launcher.config.data import DATA_ENDINGS, PACKED_ENDINGS, data_ending

Sourced = tuple[str, Mapping[str, object] | DataError]
Reader = Callable[[Path], Iterator[Sourced]]

MAX_LINE_BYTES = 16 * 2**20
"""One record. A file without line breaks would otherwise be read completely before it is found to be no JSON lines."""

MAX_LIST_BYTES = 512 * 2**20
"""A JSON list has to be read completely, at several times its size in memory."""

PARQUET_ROWS = 1024
ARROW_FILE = b"ARROW1"
HUB_PROBE_S = 10.0
NO_RECORDS = ("dataset_info.json", "dataset_infos.json")
"""What `datasets` and the hub write beside records."""
SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def read_path(path: Path, *, name: str | None, split: str, key: str) -> Iterator[Sourced]:
    """A file's records, or those of a folder's files in the order of their names."""
    try:
        if not path.is_dir() and not path.is_file() and path.exists():  # a pipe would be waited for
            raise DataError(f"{key}.path: {path} is neither a file nor a folder", f"change {key}.path")
        files = _files_of_split(_folder_of(path, name, split), split, key) if path.is_dir() else [path]
        for file in files:
            yield from _reader(file, key)(file)
    except OSError as error:
        hint = "check the path and its permissions" if error.errno else "write the file again"  # it can't be unpacked
        raise DataError(f"{key}.path: {path} can't be read: {error}", hint) from error


def _folder_of(path: Path, name: str | None, split: str) -> Path:
    """A copy of a hub repository keeps its configurations in folders of their own, or its files in `data`;
    `datasets.save_to_disk` keeps each split in a folder."""
    folder = path / name if name and (path / name).is_dir() else path
    is_saved = (folder / "dataset_dict.json").is_file()
    if not is_saved and any(map(data_ending, folder.iterdir())):
        return folder
    return next((folder / below for below in (split, "data") if (folder / below).is_dir()), folder)


def _files_of_split(folder: Path, split: str, key: str) -> list[Path]:
    """`train-00000-of-00001.parquet` and `train.jsonl` are of the split train; where no file is named so, all are."""
    entries = sorted(folder.iterdir())
    is_saved = (folder / "state.json").is_file()  # by `datasets`, whose other JSON files here are not records
    endings = (".arrow",) if is_saved else DATA_ENDINGS
    files = [one for one in entries if data_ending(one) in endings and one.name not in NO_RECORDS and one.is_file()]
    if not files:
        found = ", ".join(entry.name for entry in entries[:5]) or "nothing"
        message = f"{key}.path: {folder} holds no {', '.join(DATA_ENDINGS)} file, but {found}"
        raise DataError(message, f"change {key}.path")
    words = {file: file.stem.replace(".", "-").replace("_", "-").split("-")[0] for file in files}
    chosen = [file for file in files if words[file] == split]
    others = sorted({word for word in words.values() if word in SPLIT_WORDS})
    if not chosen and others:
        message = f"{key}.split={split!r}: {folder} has no file of that split"
        raise DataError(message, f"set {key}.split to one of: {', '.join(others)}")
    return chosen or files


def _reader(path: Path, key: str) -> Reader:
    if not (ending := data_ending(path)):
        message = f"{key}.path: {path} has the unknown ending {path.suffix!r}"
        packed = f"of text also with {', '.join(PACKED_ENDINGS)} behind it"
        raise DataError(message, f"allowed: {', '.join(DATA_ENDINGS)}; {packed}")
    return READERS[ending]


def _opened(path: Path) -> BinaryIO:
    """What is packed is unpacked as it is read; where that fails it raises OSError."""
    if path.suffix not in PACKED_ENDINGS:
        return path.open("rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="detect"))


def _read_json_lines(path: Path) -> Iterator[Sourced]:
    with _opened(path) as file:
        yield from _json_lines(path, file)


def _json_lines(path: Path, file: BinaryIO) -> Iterator[Sourced]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{path}:{number} is longer than {MAX_LINE_BYTES} bytes", "write one record on each line")
        if line.strip():
            yield f"{path}:{number}", _line(line, f"{path}:{number}")


def _read_json(path: Path) -> Iterator[Sourced]:
    """A list of records; or JSON lines, which go by this ending too."""
    with _opened(path) as file:
        first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    with _opened(path) as file:
        if first != b"[":
            yield from _json_lines(path, file)
            return
        if len(text := file.read(MAX_LIST_BYTES + 1)) > MAX_LIST_BYTES:
            raise DataError(f"{path} is a JSON list of over {MAX_LIST_BYTES} bytes", "turn it into .jsonl or .parquet")
        for row, fields in enumerate(_parse(text, str(path))):
            where = f"{path} row {row}"
            yield where, fields if isinstance(fields, dict) else _no_record(fields, where)


def _line(line: bytes, where: str) -> Mapping[str, object] | DataError:
    try:
        fields = _parse(line, where)
    except DataError as error:
        return error
    return fields if isinstance(fields, dict) else _no_record(fields, where)


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not valid JSON: no UTF-8 ({error})", "save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not valid JSON: {error.msg} ({_place(error)})", "repair the file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}", "repair the file") from error


def _place(error: json.JSONDecodeError) -> str:
    """Of a text of one line the column alone: what names the file has the line's number. The end of a cut text is not
    the line behind it."""
    at = min(error.pos, len(error.doc.rstrip()))
    before = error.doc[:at].split("\n")
    return f"line {len(before)}, " * (len(before) > 1) + f"column {len(before[-1]) + 1}"


def _no_record(value: object, where: str) -> DataError:
    return DataError(f"{where} is a {type(value).__name__}, not a record", 'write {"question": …, "answer": …}')


def _read_csv(path: Path) -> Iterator[Sourced]:
    """The first line names the columns, and every value is a text. A record is named by the line it ends in. Where that
    line has no comma, a semicolon or a tab may stand between the values."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with io.TextIOWrapper(_opened(path), encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            first = file.readline(MAX_LINE_BYTES)
            between = next((mark for mark in ",;\t" if mark in first), ",")
            reader = csv.reader(chain([first], file), strict=True, delimiter=between)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise DataError(f"{path}: its header names a column twice: {header}", "rename one of them")
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if len(row) == len(header):
                    yield where, dict(zip(header, row, strict=True))
                elif row:
                    what = f"{where} has {len(row)} values for {len(header)} columns ({', '.join(header)})"
                    yield where, DataError(what, 'quote a value that holds a comma: "a, b"')
        except (csv.Error, UnicodeDecodeError) as error:
            where = f"{path}:{reader.line_num + 1}"
            raise DataError(f"{where} is no CSV in UTF-8: {error}", "write the file again") from error


def _read_parquet(path: Path) -> Iterator[Sourced]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for fields in batch.to_pylist():
                    yield f"{path} row {row}", fields
                    row += 1
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a sound parquet file (row {row}): {error}", "write the file again") from error


def _read_arrow(path: Path) -> Iterator[Sourced]:
    """Both forms of it: a stream, as `datasets` writes it, and a file."""
    import pyarrow as pa

    row = 0
    try:
        with pa.memory_map(str(path)) as source:
            for batch in _arrow_batches(source):
                for start in range(0, batch.num_rows, PARQUET_ROWS):
                    for fields in batch.slice(start, PARQUET_ROWS).to_pylist():
                        yield f"{path} row {row}", fields
                        row += 1
    except (pa.ArrowException, OSError) as error:  # pyarrow raises OSError for a file that ends too early
        raise DataError(f"{path} is not a sound Arrow file (row {row}): {error}", "write the file again") from error


def _arrow_batches(source: Any) -> Iterator[Any]:
    from pyarrow import ipc

    if source.read(len(ARROW_FILE)) == ARROW_FILE:
        with ipc.open_file(source) as file:
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        return
    source.seek(0)
    with ipc.open_stream(source) as stream:
        yield from stream


READERS: Mapping[str, Reader] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
}


def read_hub(path: str, *, name: str | None, split: str, key: str) -> Iterator[Sourced]:
    """A hub data set, from the local cache where the hub can't be reached."""
    import datasets

    what = f"{key}: the data set {path} ({name or 'default'}, {split}) can't be loaded"
    try:
        with _one_attempt(path):
            rows = datasets.load_dataset(path, name, split=split, trust_remote_code=False)
    except ConnectionError as error:
        raise DataError(
            f"{what}: the hub can't be reached, and the local cache does not have it",
            f"load it once where there is a network (datasets.load_dataset({path!r}, {name!r})) and copy HF_HOME here, "
            f"or give {key}.path a .parquet or .jsonl file",
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{what}: {error}", f"check {key}.path, {key}.name and {key}.split") from error
    if not isinstance(rows, datasets.Dataset):
        raise DataError(f"{key}.split={split!r} names no single split of {path}", f"set {key}.split, e.g. train")
    return ((f"{path} {split} row {row}", fields) for row, fields in enumerate(rows))


@contextmanager
def _one_attempt(path: str) -> Iterator[None]:
    """Ask the hub once, and use the cache alone where it can't be reached.

    `load_dataset` itself asks six times over 23 s, with as many warnings, before it reports that there is no network.
    """
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not _hub_answers(path, config.HF_ENDPOINT)
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _hub_answers(path: str, endpoint: str) -> bool:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi(endpoint=endpoint).dataset_info(path, timeout=HUB_PROBE_S)
    except httpx.TransportError:
        return False
    except HfHubHTTPError:
        return True  # load_dataset reports what the hub objects to
    return True
