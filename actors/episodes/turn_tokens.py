"""The tokens that a chat template writes between two answers of the model: those of the new messages only.

The template is rendered behind a made answer, and what follows that answer is taken: its end mark, the new messages,
and the opening of the next answer. The made answer is a new random word each time: messages and descriptions of tools
are the user's, and any fixed words may stand in them. Where the server's own last token is that end mark, it isn't
given twice. So a transcript is what the template would write of the whole chat, for templates that leave what was said
before as it was. `check_template` refuses the others by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from actors.data.prompts import ChatTokenizer, PromptWriter
from actors.episodes.transcript import Message
from launcher.base.errors import ModelError
from launcher.config.data import ChatConfig

WORD_BYTES = 16  # no text of a user's holds it by chance, nor can one be written to hold it
THOUGHT = "<think>\nA thought.\n</think>\n\n"
USER: Message = {"role": "user", "content": "A question."}
TOOL: Message = {"role": "tool", "content": "A result.", "tool_call_id": "call00001"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "tool", "arguments": {}}}


class Unwritable(Exception):
    """The chat template can't write these messages; the message says why."""


class TurnTokens:
    """By one tokenizer and the settings of `chat`. Raises the UsageErrors of a PromptWriter."""

    def __init__(self, tokenizer: ChatTokenizer, chat: ChatConfig) -> None:
        self._tokenizer: Any = tokenizer
        self._writer = PromptWriter(tokenizer, chat)

    def opening(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        """A whole chat, up to the beginning of the model's next answer."""
        return self._encode(self._text(messages, tools))

    def following(self, last: int, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[int, ...]:
        """What comes after an answer that ended with the token `last`: `messages`, and the beginning of the next."""
        tokens = self._encode(self._after(_word(), messages, tools))
        return tokens[1:] if tokens[:1] == (last,) else tokens

    def answer_text(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def check_template(self) -> None:
        """Raises ModelError for a template that does not leave earlier turns as they were written."""
        for thought in ["", THOUGHT] if self._writer.reads("</think>") else [""]:
            word = _word()
            answer = thought + word
            try:
                ours = self._text([USER], ()) + answer + self._after(word, [USER], ())
                whole = self._text([USER, {"role": "assistant", "content": answer}, USER], ())
            except Unwritable as error:
                raise self._refusal(str(error)) from error
            if ours != whole:
                dropped = "the model's thoughts of earlier turns" if thought else "earlier turns"
                raise self._refusal(f"it drops or changes {dropped}")

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"rollout.episode: the chat template of {self._tokenizer.name_or_path!r} can't be continued turn by turn: "
            f"{why}",
            "set chat.template to a file that writes each turn once and leaves earlier ones as they were",
        )

    def _after(self, answer: str, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        said: Message = {"role": "assistant", "content": answer}
        calls = [{**CALL, "id": message.get("tool_call_id")} for message in messages if message["role"] == "tool"]
        try:
            text = self._text([USER, said, *messages], tools)
        except Unwritable:
            if not calls:
                raise
            # a template may write a tool's result behind a call alone; with calls the answer itself ends elsewhere
            head = self._text([USER, said], tools, opens=False)
            called = self._text([USER, {**said, "tool_calls": calls}], tools, opens=False)
            text = self._text([USER, {**said, "tool_calls": calls}, *messages], tools)
            if not text.startswith(called):
                raise
            return _behind(answer, head) + text[len(called) :]
        return _behind(answer, text)

    def _text(self, messages: Sequence[Message], tools: Sequence[Message], *, opens: bool = True) -> str:
        try:
            return self._writer.text([_for_template(one) for one in messages], tools, opens=opens)
        except (TemplateError, TypeError) as error:
            raise Unwritable(f"it can't write {[one.get('role') for one in messages]}: {error}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _word() -> str:
    return secrets.token_hex(WORD_BYTES)


def _behind(answer: str, text: str) -> str:
    """What a template wrote after `answer`. Raises Unwritable where it did not write the answer exactly once."""
    _, *behind = text.split(answer)
    if not behind:
        raise Unwritable("it leaves an earlier answer out")
    if len(behind) > 1:
        raise Unwritable(f"it writes an earlier answer {len(behind)} times")
    return behind[0]


def _for_template(message: Message) -> Message:
    """Templates write the arguments of a call as JSON themselves; clients send them as text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
