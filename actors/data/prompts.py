"""Prompts made of records: the chat template's tokens, or those of the question alone.

Named templates, files of one's own and the template's variables are settings (`chat.*`). A variable or a tool that the
template doesn't read is refused: it would change nothing, silently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from actors.data.chat_messages import SYSTEM, with_suffix
from actors.data.dataset import BadRecords, DataRecord
from launcher.base.errors import ConfigError, DataError, ModelError
from launcher.base.rollouts import Prompt
from launcher.config.data import NO_TEMPLATE, ChatConfig, unknown_template

PROMPTS_AT_ONCE = 512
"""Tokenised in one call: batches use the fast tokenizer's threads, and bound its memory."""


class ChatTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    chat_template: Any
    name_or_path: str

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def __call__(self, text: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


def build_prompts(
    records: Sequence[DataRecord],
    tokenizer: ChatTokenizer,
    *,
    max_prompt_tokens: int | None,
    max_length: int | None,
    key: str,
    chat: ChatConfig | None = None,
    bad: BadRecords | None = None,
) -> tuple[list[Prompt], int]:
    """The records' prompts in order, and how many were left out for being longer than `max_length` tokens.

    `max_prompt_tokens` is what the context has room for beside a complete completion. Raises ModelError and ConfigError
    where the tokenizer can't write a chat, DataError where a prompt that is not left out can't be written (without
    `bad`) or has no room, or none is left.
    """
    writer = PromptWriter(tokenizer, chat or ChatConfig())
    prompts: list[Prompt] = []
    unwritten = left_out = 0
    for start in range(0, len(records), PROMPTS_AT_ONCE):
        chunk = records[start : start + PROMPTS_AT_ONCE]
        for record, token_ids in zip(chunk, writer.write_each(chunk, bad), strict=True):
            if token_ids is None:
                unwritten += 1
            elif max_length is not None and len(token_ids) > max_length:
                left_out += 1
            else:
                _check_room(record, len(token_ids), max_prompt_tokens, key)
                prompts.append(
                    Prompt(
                        id=record.id,
                        token_ids=token_ids,
                        record=record.record,
                        answer_key=record.answer_key,
                        dataset=record.dataset,
                    )
                )
    if not prompts and unwritten:
        raise DataError(f"the chat template can't write one of the {len(records)} prompts of {key}", "chat.template")
    if not prompts:
        raise DataError(
            f"all {len(records)} prompts of {key} are longer than {key}.max_length={max_length} tokens",
            f"raise {key}.max_length, or set it to null",
        )
    return prompts, left_out


class PromptWriter:
    """Token ids of chats, by one tokenizer and the settings of `chat`."""

    def __init__(self, tokenizer: ChatTokenizer, chat: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._name = tokenizer.name_or_path
        self._is_plain = chat.template == NO_TEMPLATE
        self._system = chat.system_prompt
        self._suffix = chat.question_suffix or ""
        self._options: dict[str, Any] = dict(chat.template_kwargs)
        self._source = "" if self._is_plain else self._template(chat.template)
        if chat.template not in (None, NO_TEMPLATE):
            self._options["chat_template"] = self._source
        for variable in chat.template_kwargs:
            if not self.reads(variable):
                raise ConfigError(
                    f"chat.template_kwargs.{variable}: the chat template of {self._name!r} has no such variable",
                    "leave it out, or set chat.template to one that reads it",
                )

        if chat.system_prompt and not self._is_plain:
            self._check_system_is_written()

    def write_each(self, records: Sequence[DataRecord], bad: BadRecords | None) -> list[tuple[int, ...] | None]:
        """None for a record that the template refuses, which `bad` has counted."""
        try:
            return [*self._write(records)]
        except (TemplateError, TypeError) as error:  # a template adds texts, and a content may be a list
            if len(records) > 1:
                return [ids for record in records for ids in self.write_each([record], bad)]
            self._check_simplest(error)
            (record,) = records
            self._check_system(record, error)
            refusal = DataError(
                f"{record.where}: the chat template of {self._name!r} can't write this chat: {error}",
                self._remedy(record),
            )
            if bad is None:
                raise refusal from error
            bad.add(refusal)
            return [None]

    def _check_simplest(self, error: Exception) -> None:
        """A template that can't write even this is at fault, and no record is."""
        try:
            self._apply([[{"role": "user", "content": "?"}]])
        except (TemplateError, TypeError):
            what = f"the chat template of {self._name!r} can't write a user's message: {error}"
            raise ModelError(what, "set another tokenizer_path, or chat.template") from error

    def _check_system(self, record: DataRecord, error: Exception) -> None:
        """A chat that can be written without chat.system_prompt is not at fault. Raises ConfigError."""
        if not self._adds_system(record):
            return
        try:
            self._apply([self._chat(record)[1:]], **({"tools": list(record.tools)} if record.tools else {}))
        except (TemplateError, TypeError):
            return
        raise self._no_system(f"can't write one: {error}") from error

    def _remedy(self, record: DataRecord) -> str:
        """Of a chat that is refused: what all records may have is no fault of this one."""
        chat, tools = self._chat(record), ({"tools": list(record.tools)} if record.tools else {})
        as_texts = [{**message, "content": _one_text(message["content"])} for message in chat]
        has_system = chat[0]["role"] in SYSTEM
        for changed, remedy in (
            (
                chat[1:] if has_system else chat,
                "drop the system messages, or set chat.template to one that writes them",
            ),
            (as_texts, "give each content as one text, or set chat.template to one that takes a list of parts"),
        ):
            if changed == chat:
                continue
            with suppress(TemplateError, TypeError):
                self._apply([changed], **tools)
                return remedy
        return "repair the record; bad_records=skip leaves such records out"

    def _check_system_is_written(self) -> None:
        """Templates without a system role may leave it out without a word. Raises ConfigError.

        One that writes it in a form of its own (JSON, other line breaks) writes another one differently.
        """
        system = self._system or ""
        asked = {"role": "user", "content": "?"}
        try:
            text, other = (
                self.text([{"role": "system", "content": content}, asked], (), opens=True)
                for content in (system, f"Not: {system}")
            )
        except (TemplateError, TypeError):  # met again where the first record is written, whoever is at fault
            return
        if system.strip() not in text and text == other:
            raise self._no_system("writes no system message")

    def _no_system(self, why: str) -> ConfigError:
        return ConfigError(
            f"chat.system_prompt={self._system!r:.80}: the chat template of {self._name!r} {why}",
            "leave chat.system_prompt out, say it in chat.question_suffix, or set chat.template to one that writes it",
        )

    def _adds_system(self, record: DataRecord) -> bool:
        return self._system is not None and record.messages[0]["role"] not in SYSTEM

    def _write(self, records: Sequence[DataRecord]) -> list[tuple[int, ...]]:
        if self._is_plain:
            return self._checked(self._tokenizer([record.question + self._suffix for record in records]))
        if not any(record.tools for record in records):
            return self._apply([self._chat(record) for record in records])
        if not self.reads("tools"):
            where = next(record.where for record in records if record.tools)
            raise ModelError(
                f"{where}: there are tools, and the chat template of {self._name!r} writes none",
                "set chat.template to one that does, or tools_key to null",
            )
        return [ids for r in records for ids in self._apply([self._chat(r)], tools=list(r.tools) or None)]

    def _chat(self, record: DataRecord) -> list[Any]:
        messages = with_suffix(record.messages, self._suffix) if self._suffix else list(record.messages)
        if self._adds_system(record):
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def _apply(self, chats: list[Any], **more: Any) -> list[tuple[int, ...]]:
        # transformers 4 and 5 differ in what they return unasked, so the dictionary is asked for
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True} | self._options | more
        return self._checked(self._tokenizer.apply_chat_template(chats, **options))

    def text(self, messages: Sequence[Any], tools: Sequence[Any], *, opens: bool) -> str:
        """One chat as the template writes it; `opens`: up to the beginning of the model's answer. Raises TemplateError
        and TypeError where it can't, ConfigError where there is no template."""
        if self._is_plain:
            raise ConfigError(
                f"chat.template={NO_TEMPLATE}: there is no template for a chat", "leave chat.template out"
            )
        options = {"add_generation_prompt": opens, "tokenize": False} | self._options
        text: str = self._tokenizer.apply_chat_template([*messages], tools=[*tools] or None, **options)
        return text

    def _checked(self, encoded: Any) -> list[tuple[int, ...]]:
        ids = [tuple(map(int, token_ids)) for token_ids in encoded["input_ids"]]
        if not all(ids):
            writer = "tokenizer" if self._is_plain else "chat template"
            raise ModelError(f"the {writer} of {self._name!r} writes an empty prompt", "set another tokenizer_path")
        return ids

    def _template(self, wanted: str | None) -> str:
        """The text of the template that `chat.template` means."""
        known = self._tokenizer.chat_template
        if wanted is not None and Path(wanted).is_file():
            return Path(wanted).read_text()
        if isinstance(known, dict) and (wanted or "default") in known:
            return str(known[wanted or "default"])
        named = sorted(known) if isinstance(known, dict) else []
        if wanted is not None:
            raise ConfigError(*unknown_template(wanted, named, tokenizer=self._name))
        if not known or named:
            of_several = f" by default, but by name: {', '.join(named)}" if named else ""
            raise ModelError(
                f"the tokenizer of {self._name!r} has no chat template{of_several}",
                "set tokenizer_path to a chat model's (…-Instruct), put a chat_template.jinja into the folder, "
                f"or set chat.template to a file, or to {NO_TEMPLATE} for plain text",
            )
        return str(known)

    def reads(self, variable: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(variable)}(?!\w)", self._source) is not None


def _one_text(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _check_room(record: DataRecord, length: int, limit: int | None, key: str) -> None:
    if limit is not None and length > limit:
        raise DataError(
            f"{record.where}: the prompt ({record.question[:50]!r}…) of {key} has {length} tokens, and there is room "
            f"for {limit}",
            f"room is sglang.context_length - gconfig.max_new_tokens; raise the one, lower the other, "
            f"or leave such prompts out with {key}.max_length={max(limit, 1)}",
        )
