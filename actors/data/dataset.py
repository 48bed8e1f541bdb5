"""Records from files or the Hugging Face hub, and the prompts made of them.

Imports neither torch nor ray: the driver reads the data before it starts anything, so that a data set that can't be
used costs seconds and not a cluster. Each record is checked as it is read; the message names its file and line (from
1) or row (from 0).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from actors.data.answers import has_number
from actors.data.record_sources import Sourced, read_hub, read_path
from launcher.base.errors import DataError, ModelError
from launcher.base.rollouts import Prompt
from launcher.config.schema import DatasetConfig

ID_HEX = 16
"""64 bits: two different records among a million share them once in 10⁷ data sets, and then get suffixes."""

PROMPTS_AT_ONCE = 512
"""Tokenised in one call: batches use the fast tokenizer's threads, and bound its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """One problem. `record` is all that the data set has of it, as the reward function gets it."""

    id: str
    question: str
    answer: str
    record: Mapping[str, object]


class ChatTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    chat_template: Any
    name_or_path: str

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


def load_records(dataset: DatasetConfig, *, key: str) -> list[DataRecord]:
    """The records in the data set's own order. `key` is the setting's name for messages, e.g. train_dataset.

    Raises DataError: nothing there, nothing in it, or a record that can't be used.
    """
    source = _open(dataset, key)
    seen: Counter[str] = Counter()
    records = [_record(where, fields, seen) for where, fields in islice(source, dataset.max_items)]
    if not records:
        raise DataError(f"{key}.path={dataset.path!r} holds no records", f"{key}.path: a data set with at least one")
    return records


def _open(dataset: DatasetConfig, key: str) -> Iterator[Sourced]:
    path = Path(dataset.path).expanduser()
    if _exists(path, key):
        return read_path(path, name=dataset.name, split=dataset.split, key=key)
    if _is_hub_name(dataset.path):
        return read_hub(dataset.path, name=dataset.name, split=dataset.split, key=key)
    raise DataError(
        f"{key}.path={dataset.path!r} does not exist",
        f"{key}.path: a .parquet, .jsonl or .json file, a folder of those, or a hub name such as openai/gsm8k",
    )


def _exists(path: Path, key: str) -> bool:
    try:
        return path.exists()
    except OSError as error:  # no permission for a folder above it, a name that is too long
        raise DataError(f"{key}.path={str(path)!r} can't be looked up: {error}", f"check {key}.path") from error


def _is_hub_name(path: str) -> bool:
    looks_local = path.startswith(("/", ".", "~")) or Path(path).suffix in {".parquet", ".jsonl", ".json"}
    return not looks_local and path.count("/") <= 1


def _record(where: str, fields: Mapping[str, object], seen: Counter[str]) -> DataRecord:
    question, answer = _text(where, fields, "question"), _text(where, fields, "answer")
    if not has_number(answer):
        raise DataError(
            f"{where}: the answer has no number after ####: {answer[-60:]!r}",
            "an answer must end in its number, as in: ... #### 42",
        )
    return DataRecord(
        id=_stable_id(where, question, answer, seen), question=question, answer=answer, record=dict(fields)
    )


def _text(where: str, fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if isinstance(value, str) and value.strip():
        return value
    found = f"has no {name}" if value is None else f"has the {name} {value!r}"
    raise DataError(
        f"{where}: the record {found}; its fields are {sorted(map(str, fields))}",
        "each record needs `question` and `answer`, both texts that are not empty",
    )


def _stable_id(where: str, question: str, answer: str, seen: Counter[str]) -> str:
    """The content's hash, so that neither the order nor the file's name matters. Exact copies count up: `…-2`."""
    try:
        content = f"{question}\0{answer}".encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise DataError(f"{where}: not valid Unicode: {error}", "repair or drop the record") from error
    digest = hashlib.sha256(content).hexdigest()[:ID_HEX]
    seen[digest] += 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def build_prompts(
    records: Sequence[DataRecord],
    tokenizer: ChatTokenizer,
    *,
    max_prompt_tokens: int | None,
    max_length: int | None,
    key: str,
) -> tuple[list[Prompt], int]:
    """The records' prompts in order, and how many were left out for being longer than `max_length` tokens.

    `max_prompt_tokens` is what the context has room for beside a complete completion. Raises ModelError where the
    tokenizer can't write a chat, DataError where a prompt that is not left out has no room, or none is left.
    """
    prompts: list[Prompt] = []
    for start in range(0, len(records), PROMPTS_AT_ONCE):
        chunk = records[start : start + PROMPTS_AT_ONCE]
        for record, token_ids in zip(chunk, _tokenise(chunk, tokenizer), strict=True):
            if max_length is not None and len(token_ids) > max_length:
                continue
            _check_room(record, len(token_ids), max_prompt_tokens, key)
            prompts.append(Prompt(id=record.id, token_ids=token_ids, record=record.record))
    if not prompts:
        raise DataError(
            f"all {len(records)} prompts of {key} are longer than {key}.max_length={max_length} tokens",
            f"raise {key}.max_length, or set it to null",
        )
    return prompts, len(records) - len(prompts)


def _tokenise(records: Sequence[DataRecord], tokenizer: ChatTokenizer) -> list[tuple[int, ...]]:
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {name!r} has no chat template",
            "set tokenizer_path to a chat model's (…-Instruct), or put a chat_template.jinja into the folder",
        )
    chats = [[{"role": "user", "content": record.question}] for record in records]
    try:
        # transformers 4 and 5 differ in what they return unasked, so the dictionary is asked for
        encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=True)
    except TemplateError as error:
        raise ModelError(
            f"the chat template of {name!r} can't write a user's message: {error}", "set another tokenizer_path"
        ) from error
    ids = [tuple(map(int, token_ids)) for token_ids in encoded["input_ids"]]
    if not all(ids):
        raise ModelError(f"the chat template of {name!r} writes an empty prompt", "set another tokenizer_path")
    return ids


def _check_room(record: DataRecord, length: int, limit: int | None, key: str) -> None:
    if limit is not None and length > limit:
        raise DataError(
            f"{key}: the prompt of record {record.id} ({record.question[:50]!r}…) has {length} tokens, "
            f"and there is room for {limit}",
            f"room is sglang.context_length - gconfig.max_new_tokens; raise the one, lower the other, "
            f"or leave such prompts out with {key}.max_length={max(limit, 1)}",
        )
