"""The words of a command line in Hydra's grammar: how a text is quoted, and why a word can't be read."""

from __future__ import annotations

import re
import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from launcher.base.errors import ConfigError

BRACKETS = {"[": "]", "{": "}"}
SIGNS = ("=", ",", "(", ")", "[", "]", "{", "}", '"', "'", "#", ":", "$", "\\")
"""What has a meaning of its own in a value, or can't be written there without quotes."""
KEY_AND_VALUE = "write key=value, without spaces around the ="
LIST = "a list is one word for the shell: 'key=[a,b]'"
LONGEST = 200
"""Characters of an argument that is shown: a whole file may have been pasted."""


def quoted(text: str) -> str:
    """As a text in Hydra's grammar, with `${…}` left for whom it is meant."""
    return QuotedString(text=text.replace("${", "\\${"), quote=Quote.double).with_quotes()


def refuse_not_utf8(arguments: list[str]) -> None:
    """Raises ConfigError: such an argument can be written to no file of the run, and would fail there."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            shown = shorten(argument.encode(errors="surrogateescape").decode(errors="backslashreplace"))
            at = error.start + 1
            raise ConfigError(
                f"{shown}: character {at} of this argument is not UTF-8",
                "write it in UTF-8; rename a file or folder whose name is in another encoding",
            ) from error


def unreadable(argument: str) -> ConfigError:
    """Why Hydra can't read this argument, and how to write it."""
    key, equals, value = argument.partition("=")
    shown = f"'{shorten(argument)}'"
    if not equals and not argument.startswith("~"):
        return ConfigError(f"the argument {shown} can't be read: it has no =", f"{KEY_AND_VALUE}; {LIST}")
    if not _can_be_read(f"{key}=1"):
        return ConfigError(
            f"the argument {shown} can't be read: {shorten(key) or 'nothing before the ='} is no key",
            f"{KEY_AND_VALUE}; docs/configuration.md has the keys",
        )
    if (call := re.match(rf"({'|'.join(create_functions().functions)})\(", value)) and value.endswith(")"):
        return ConfigError(
            f"the argument {shown} can't be read: {call[1]}(…) can't be given these values",
            f"write the values, separated by commas; {written_as_text(key, value)}",
        )
    as_text = written_as_text(key, value)
    for opening, closing in BRACKETS.items():
        if value.startswith(opening) and not value.endswith(closing):
            return ConfigError(f"the argument {shown} can't be read: its {opening} has no {closing}", LIST)
    if value[:1] in BRACKETS:
        return ConfigError(
            f"the argument {shown} can't be read as a list or mapping",
            f"put each text in it into double quotes and the argument into single ones; {as_text}",
        )
    signs = " ".join(sign for sign in SIGNS if sign in value)
    what = f"{signs} in a value need quotes" if signs else "its value needs quotes"
    return ConfigError(f"the argument {shown} can't be read: {what}", as_text)


def written_as_text(key: str, value: str) -> str:
    return f"as a text, write {shlex.quote(f'{key}={quoted(value)}')}"


def shorten(argument: str) -> str:
    """In one line, with what was left out of it as …."""
    line = " ".join(argument.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def is_plain_text(value: str) -> bool:
    """Whether a value that is typed as it is, is this text: `true`, `null` and `é` are not."""
    try:
        return bool(OverridesParser.create().parse_override(f"key={value}").value() == value)
    except HydraException:
        return False


def _can_be_read(argument: str) -> bool:
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return bool(parsed.key_or_group)
