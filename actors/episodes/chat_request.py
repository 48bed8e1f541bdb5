"""Requests for a chat completion, in OpenAI's form: what is asked, checked, and the answer to it. No HTTP here.

Sampling is the run's, since the objective needs its log-probs: `temperature`, `top_p` and `seed` of a request are not
used. What would change the tokens in another way is refused.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.data.chat_messages import messages_of, tools_of
from actors.episodes.transcript import Message
from launcher.base.errors import DataError

REFUSED: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "stop": (None, []),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
"""Fields of a request, and their values that change nothing."""
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
STOP, LENGTH, CALLS = "stop", "length", "tool_calls"


class BadRequest(Exception):
    """It can't be answered; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """`max_tokens`: of this answer; None: as many as the run allows."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    max_tokens: int | None
    is_streamed: bool
    model: str

    @classmethod
    def of(cls, body: object) -> ChatRequest:
        """Raises BadRequest."""
        if not isinstance(body, Mapping):
            raise BadRequest("the body is no JSON object")
        for name, allowed in REFUSED.items():
            if body.get(name) not in allowed:
                raise BadRequest(f"{name}={body[name]!r:.100} is not possible in an episode: sampling is the run's")
        try:
            messages = messages_of(body.get("messages"), where="the request", column="messages")
            tools = () if body.get("tool_choice") == "none" else tools_of(body.get("tools"), "the request", "tools")
        except DataError as error:
            raise BadRequest(str(error).replace("\n", " ")) from error
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise BadRequest(f"max_tokens={most!r:.100} is no number of tokens")
        return cls(
            messages=tuple(_with_text(message) for message in messages),
            tools=tools,
            max_tokens=most,
            is_streamed=bool(body.get("stream")),
            model=str(body.get("model", "")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """`message` is what the client may send back as the assistant's."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, text: str, finish_reason: str, *, has_tools: bool, prompt_tokens: int, tokens: int) -> ChatAnswer:
        """The text as a message; its calls of tools are in `<tool_call>` marks (Qwen's and Hermes' form)."""
        calls = _calls_in(text) if has_tools else []
        content = CALL.sub("", text).strip() if calls else text
        message: dict[str, object] = {"role": "assistant", "content": content or (None if calls else "")}
        return cls(
            message=message | ({"tool_calls": calls} if calls else {}),
            finish_reason=CALLS if calls and finish_reason == STOP else finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
        )

    def body(self, model: str) -> dict[str, Any]:
        return self._frame("chat.completion", model) | {
            "choices": [{"index": 0, "message": self.message, "finish_reason": self.finish_reason, "logprobs": None}],
            "usage": self._usage(),
        }

    def events(self, model: str) -> list[dict[str, Any]]:
        """Of a stream: the whole answer, then its end."""
        calls = self.message.get("tool_calls")
        listed = calls if isinstance(calls, list) else []
        numbered = [{"index": index, **call} for index, call in enumerate(listed)]
        delta = {**self.message, "tool_calls": numbered} if numbered else self.message
        frame = self._frame("chat.completion.chunk", model)
        return [
            frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            frame
            | {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}], "usage": self._usage()},
        ]

    def _frame(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def _calls_in(text: str) -> list[dict[str, object]]:
    """None where one of them is no call: then the text is only a text."""
    calls: list[dict[str, object]] = []
    for found in CALL.findall(text):
        try:
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        calls.append({"id": f"call{secrets.token_hex(8)}", "type": "function", "function": function})
    return calls


def _with_text(message: Message) -> Message:
    """A content in parts is joined; a call alone has none."""
    content = message["content"]
    parts: Sequence[Any] = content if isinstance(content, list) else []
    return {**message, "content": "".join(part["text"] for part in parts)} if parts else message
