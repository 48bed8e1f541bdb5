"""Records of any columns from files or the Hugging Face hub, each checked as it is read.

Imports neither torch nor ray: the driver reads the data before it starts anything, so that a data set that can't be
used costs seconds and not a cluster. A message names the record's file and line (from 1) or row (from 0). What an
answer must look like is the reward function's own business (`actors/reward/data_check.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from actors.data.chat_messages import Message, messages_of, tools_of
from actors.data.record_sources import Sourced, read_hub, read_path
from launcher.base.errors import DataError
from launcher.config.data import DATA_ENDINGS, DatasetConfig, data_ending

ID_HEX = 16
"""64 bits: two different records among a million share them once in 10⁷ data sets, and then get suffixes."""
MOST_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """One problem, `where` it was read, and its chat. `record` is all that the data set has of it, as the reward
    function gets it. `question` is the text of the last message. `dataset`: its name where it is one of several, which
    its ids begin with, as data sets may share records."""

    id: str
    where: str
    question: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...]
    answer: object
    answer_key: str | None
    record: Mapping[str, object]
    dataset: str = ""


class BadRecords:
    """What doesn't fit: raised, or counted with a few examples, as the data set's `bad_records` says."""

    def __init__(self, dataset: DatasetConfig) -> None:
        self._refuses = dataset.bad_records == "refuse"
        self.count = 0
        self.examples: list[str] = []

    def add(self, error: DataError) -> None:
        if self._refuses:
            raise error
        self.count += 1
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(error.message)


def load_records(dataset: DatasetConfig, *, key: str, bad: BadRecords | None = None) -> list[DataRecord]:
    """The records in the data set's own order. `key` is the setting's name for messages, e.g. train_dataset.

    Raises DataError: nothing there, nothing in it, or a record that can't be used and isn't to be skipped.
    """
    bad = bad or BadRecords(dataset)
    seen: Counter[str] = Counter()
    records = []
    for where, fields in islice(_open(dataset, key), dataset.max_items):
        try:
            records.append(_record(where, fields, seen, dataset, key))
        except DataError as error:
            bad.add(error)
    if not records:
        found = f"no record that fits: {bad.examples[0]}" if bad.count else "no records"
        raise DataError(f"{key}.path={dataset.path!r} holds {found}", f"{key}.path: a data set with at least one")
    return records


def _open(dataset: DatasetConfig, key: str) -> Iterator[Sourced]:
    path = Path(dataset.path).expanduser()
    if _exists(path, key):
        return read_path(path, name=dataset.name, split=dataset.split, key=key)
    if _is_hub_name(dataset.path):
        return read_hub(dataset.path, name=dataset.name, split=dataset.split, key=key)
    raise DataError(
        f"{key}.path={dataset.path!r} does not exist",
        f"{key}.path: a {', '.join(DATA_ENDINGS)} file, a folder of those, or a hub name such as openai/gsm8k",
    )


def _exists(path: Path, key: str) -> bool:
    try:
        return path.exists()
    except OSError as error:  # no permission for a folder above it, a name that is too long
        raise DataError(f"{key}.path={str(path)!r} can't be looked up: {error}", f"check {key}.path") from error


def _is_hub_name(path: str) -> bool:
    looks_local = path.startswith(("/", ".", "~")) or data_ending(path)
    return not looks_local and path.count("/") <= 1


def _record(
    where: str, fields: Mapping[str, object] | DataError, seen: Counter[str], dataset: DatasetConfig, key: str
) -> DataRecord:
    if isinstance(fields, DataError):
        raise fields
    given: object
    if dataset.messages_key is None:
        given = question = _question(where, fields, dataset.prompt_key, key)
        messages: tuple[Message, ...] = ({"role": "user", "content": question},)
    else:
        given = _column(where, fields, dataset.messages_key, f"{key}.messages_key")
        messages = messages_of(given, where=where, column=dataset.messages_key)
        question = str(messages[-1].get("content", ""))
    tools = () if dataset.tools_key is None else tools_of(fields.get(dataset.tools_key), where, dataset.tools_key)
    answer = None
    if dataset.answer_key is not None:
        answer = _column(where, fields, dataset.answer_key, f"{key}.answer_key")
    content = (given, answer, list(tools)) if tools else (given, answer)
    dataset_name = key.partition("_datasets.")[2]
    return DataRecord(
        id=f"{dataset_name}:" * bool(dataset_name) + _stable_id(where, content, seen),
        where=where,
        question=question,
        messages=messages,
        tools=tools,
        answer=answer,
        answer_key=dataset.answer_key,
        record=dict(fields),
        dataset=dataset_name,
    )


def _question(where: str, fields: Mapping[str, object], column: str, key: str) -> str:
    value = _column(where, fields, column, f"{key}.prompt_key")
    if isinstance(value, str) and value.strip():
        return value
    raise DataError(
        f"{where}: the record has the {column} {value!r:.100}; its fields are {sorted(map(str, fields))}",
        f"{key}.prompt_key: a column of texts that are not empty; of chat messages: {key}.messages_key; "
        f"{_skipped(key)}",
    )


def _skipped(key: str) -> str:
    return f"{key}.bad_records=skip leaves such records out"


def _column(where: str, fields: Mapping[str, object], column: str, setting: str) -> object:
    value = fields.get(column)
    if value is None:
        outer = column.partition(".")[0]
        is_inside = outer != column and isinstance(fields.get(outer), Mapping)
        taken = f"; the reward function gets {outer} as a dict" if setting.endswith("answer_key") else ""
        hint = (
            f"{setting}: {outer}, as columns are read whole{taken}" if is_inside else f"{setting}: the column to read"
        )
        hint += ", or null where the data set has no answers" if setting.endswith("answer_key") else ""
        skipped = _skipped(setting.rpartition(".")[0])
        if column in fields:
            hint = f"fill it in; {skipped}"
            hint += f"; {setting}=null: the data set has no answers" if setting.endswith("answer_key") else ""
            raise DataError(f"{where}: the record has no {column}: it is null", hint)
        fields_there = sorted(map(str, fields))
        raise DataError(f"{where}: the record has no {column}; its fields are {fields_there}", f"{hint}; {skipped}")
    return value


def _stable_id(where: str, content: tuple[object, ...], seen: Counter[str]) -> str:
    """The content's hash, so that neither the order nor the file's name matters. Exact copies count up: `…-2`."""
    texts = [part if isinstance(part, str) else _as_text(part) for part in content]
    try:
        data = "\0".join(texts).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise DataError(f"{where}: not valid Unicode: {error}", "repair or drop the record") from error
    digest = hashlib.sha256(data).hexdigest()[:ID_HEX]
    seen[digest] += 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def _as_text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
