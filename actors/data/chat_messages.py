"""Chat messages as data sets have them: a list of {role, content}, checked before any template sees it.

In a CSV file, or where a column is text, the list is JSON. Raises DataError, which names the record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from launcher.base.errors import DataError

Message = Mapping[str, object]

SYSTEM = ("system", "developer")
ROLES = (*SYSTEM, "user", "assistant", "tool")
ANSWERABLE = ("user", "tool")
FORM = 'a list of messages such as {"role": "user", "content": "…"}'


def messages_of(value: object, *, where: str, column: str) -> tuple[Message, ...]:
    """The chat in a record's `column`, which ends where the model has to answer."""
    listed = _listed(value)
    if not listed:
        raise _wrong(where, column, f"is {value!r:.100}", f"it must be {FORM}")
    messages = tuple(_message(message, where, column, number) for number, message in enumerate(listed))
    roles = [str(message["role"]) for message in messages]
    spoken = [role for role in roles if role not in SYSTEM]
    if any(role in SYSTEM for role in roles[1:]):
        raise _wrong(where, column, f"has the roles {roles}", "a system message comes first, and once")
    if not spoken or spoken[0] != "user":
        raise _wrong(where, column, f"has the roles {roles}", "after the system message the user speaks first")
    if spoken[-1] not in ANSWERABLE:
        what = f"ends with the {spoken[-1]}'s message: there is nothing for the model to answer"
        raise _wrong(where, column, what, "drop that message, or move it into a column that answer_key names")
    return messages


def with_suffix(messages: Sequence[Message], suffix: str) -> list[Message]:
    """The chat with `suffix` behind the last message of the user; a tool's result may follow that one."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "user")
    content = messages[last]["content"]
    if isinstance(content, list):
        *before, part = content
        changed: object = [*before, {**part, "text": f"{part['text']}{suffix}"}]
    else:
        changed = f"{content}{suffix}"
    return [*messages[:last], {**messages[last], "content": changed}, *messages[last + 1 :]]


def tools_of(value: object, where: str, column: str) -> tuple[Mapping[str, object], ...]:
    """The tools in a record's `column`; none where it is empty."""
    if value is None or value == "":
        return ()
    listed = _listed(value)
    if listed is None or not all(isinstance(tool, Mapping) for tool in listed):
        raise _wrong(where, column, f"is {value!r:.100}", "tools are a list of JSON schemas")
    return tuple(_without_nulls(tool) for tool in listed)


def _message(message: object, where: str, column: str, number: int) -> Message:
    column = f"{column}[{number}]"
    if not isinstance(message, Mapping):
        raise _wrong(where, column, f"is {message!r:.100}", f"the column must be {FORM}")
    kept: dict[str, object] = _without_nulls(message)
    content, role = kept.get("content"), kept.get("role")
    if role not in ROLES:
        raise _wrong(where, column, f"has the role {role!r}", f"allowed: {', '.join(ROLES)}")
    if content is None and kept.get("tool_calls"):
        return kept | {"content": ""}
    parts = content if isinstance(content, list) else []
    is_text = bool(parts) and all(map(_is_text, parts))
    if not isinstance(content, str) and not is_text:
        raise _wrong(where, column, f"has the content {content!r:.100}", "only texts are trained on")
    return kept


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _listed(value: object) -> list[object] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _without_nulls(value: object) -> dict[str, object]:
    """A table has every key in every row, null where it is not given; templates ask whether a key is there."""
    assert isinstance(value, Mapping)
    return {str(key): _plain(item) for key, item in value.items() if item is not None}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return _without_nulls(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _wrong(where: str, column: str, what: str, hint: str) -> DataError:
    return DataError(f"{where}: {column} {what}", hint)
