"""Declares one setting: its default, what it means, and which values are allowed, in one place.

`launcher/config/schema.py` declares with `setting`, `part` and `same_as`; `settings_of` walks the schema for whoever
shows or checks it: the range checks, the nearest known key of a misspelt one, docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

MISSING: Any = "???"
"""OmegaConf's marker: a value must be given."""

Value = TypeVar("Value")


class Allowed(Protocol):
    """Which values a setting may take; `str()` describes them, to be read after "allowed:"."""

    def allows(self, value: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values, mostly names."""

    choices: tuple[str | int, ...]

    def allows(self, value: Any) -> bool:
        return value in self.choices

    def __str__(self) -> str:
        return ", ".join(map(str, self.choices))


@dataclass(frozen=True, slots=True)
class Between:
    """A number from `low` to `high`; an end that is `open` is itself not allowed. NaN and infinity never are."""

    low: float
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    why: str = ""

    def allows(self, value: Any) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        if self.high is None:
            return bool(above and value != float("inf"))
        return bool(above and (value < self.high if self.open_high else value <= self.high))

    def __str__(self) -> str:
        low = f"more than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        high = f" and {'less than' if self.open_high else 'at most'} {self.high:.15g}" if self.high is not None else ""
        return f"{low}{high}{f', {self.why}' if self.why else ''}"


COUNT = Between(1)
NATURAL = Between(0)
POSITIVE = Between(0, open_low=True)
SHARE = Between(0, 1, open_low=True)
SEED = Between(0, 2**31 - 1, why="since SGLang's seed has 32 bits and each restart of a server adds to it")
TEMPERATURE = Between(1e-6, why="since SGLang takes the likeliest token below that")
DEADLINE = Between(0, 86_400, open_low=True, why="since a deadline of more than a day would never fire")


@dataclass(frozen=True, slots=True)
class Matching:
    """A text of a certain form, described by `form`."""

    pattern: str
    form: str

    def allows(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, str(value)) is not None

    def __str__(self) -> str:
        return self.form


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of time, as Slurm writes it or in seconds."""

    def allows(self, value: Any) -> bool:
        return seconds_of(str(value)) > 0

    def __str__(self) -> str:
        return "MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, or seconds; more than 0"


def seconds_of(text: str) -> float:
    """`23:50:00` or `1-12` (days and hours), as Slurm has them; a plain number is seconds. 0 where it is neither."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d\d?))?(?::(\d\d?))?(\.\d+)?", text.strip())
    if found is None or (found[5] and (found[1] or found[3])):
        return 0.0
    parts = [int(part) for part in found.groups()[1:4] if part is not None]
    if any(part >= 60 for part in parts[1:]):
        return 0.0
    if found[1] is None and len(parts) < 3:
        parts = [0] * (3 - len(parts)) + parts
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(found[1] or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds + float(found[5] or 0)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """What any of several allows, e.g. -1 or a positive number."""

    options: tuple[Allowed, ...]

    def allows(self, value: Any) -> bool:
        return any(option.allows(value) for option in self.options)

    def __str__(self) -> str:
        return " or ".join(str(option) for option in self.options)


def setting(default: Value, meaning: str, allowed: Allowed | None = None) -> Value:
    """One setting of a schema class. A list or a dict as default is copied for each instance."""
    metadata = {"meaning": meaning, "allowed": allowed}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return dataclasses.field(default=default, metadata=metadata)


def same_as(key: str, meaning: str, allowed: Allowed | None = None) -> Any:
    """A setting that follows another until it is given; resolved when the configuration is composed."""
    return setting(f"${{{key}}}", meaning, allowed)


def part(section: Callable[[], Value]) -> Value:
    """A nested schema class with its own defaults."""
    return dataclasses.field(default_factory=section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as declared. `type` is for people ("float or null"), `default` as YAML has it."""

    key: str
    type: str
    default: Any
    meaning: str
    allowed: Allowed | None


def settings_of(schema: type, prefix: str = "") -> Iterator[Setting]:
    """All settings of a schema class in the order of declaration, nested ones under their dotted key."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key = prefix + field.name
        section = _section(hints[field.name])
        if section is not None:
            yield from settings_of(section, f"{key}.")
        else:
            yield Setting(
                key=key,
                type=_type_name(hints[field.name]),
                default=_default(field),
                meaning=field.metadata["meaning"],
                allowed=field.metadata["allowed"],
            )


def value_of(config: object, key: str) -> Any:
    """The value at a dotted key; None where a section on the way is None."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None if value is None else getattr(value, name)
    return value


def as_typed(value: object) -> str:
    """As on a command line."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _section(hint: Any) -> type | None:
    options = [hint, *typing.get_args(hint)] if _is_union(hint) else [hint]
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _type_name(hint: Any) -> str:
    if _is_union(hint):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "mapping"
    return "null" if hint is type(None) else str(hint.__name__)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default
