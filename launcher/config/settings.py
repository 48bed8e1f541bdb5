"""Declares one setting: its default, what it means, and which values are allowed, in one place.

`launcher/config/schema.py` declares with `setting`, `part` and `same_as`. What comes of it is a plain dataclass whose
fields have pydantic's own names for limits (`ge`, `pattern`, …) in their metadata, where pydantic reads them from. Only
`launcher.config.validation` imports pydantic: policies, actors and the keeper read records of the standard library.
`settings_of` walks the schema for whoever shows settings: docs/configuration.md, an error's message, `init`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

MISSING: Any = "???"
"""OmegaConf's marker: a value must be given."""

Value = TypeVar("Value")
Limits = Mapping[str, object]
"""As pydantic's Field has them. Beside them `why`, the reason of a limit, and `form`, a pattern or limit in words."""


def between(low: float, high: float | None = None, *, why: str = "") -> Limits:
    """Both ends included."""
    return {"ge": low, "le": high, "why": why}


def matching(pattern: str, form: str) -> Limits:
    """A text of a certain form, described by `form`."""
    return {"pattern": rf"\A(?:{pattern})\Z", "form": form}  # `$` would let a line end pass


COUNT = between(1)
NATURAL = between(0)
POSITIVE: Limits = {"gt": 0}
SHARE: Limits = {"gt": 0, "le": 1}
SEED = between(0, 2**31 - 1, why="since SGLang's seed has 32 bits and each restart of a server adds to it")
TEMPERATURE = between(1e-6, why="since SGLang takes the likeliest token below that")
DEADLINE: Limits = {"gt": 0, "le": 86_400, "why": "since a deadline of more than a day would never fire"}
DURATION = matching(
    r"\s*(?=.*[1-9])(?:(?:\d+-)?\d+(?::[0-5]?\d){0,2}|\d+\.\d+)\s*",
    "MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, or seconds; more than 0",
)


def seconds_of(text: str) -> float:
    """Of a text that DURATION allows: `23:50:00` or `1-12` (days and hours), as Slurm has them; a plain number is
    seconds."""
    days, _, time = text.strip().rpartition("-")
    parts = [float(part) for part in time.split(":")]
    hours, minutes, seconds = (*parts, 0, 0)[:3] if days or len(parts) == 3 else (0, 0, *parts)[-3:]
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def setting(default: Value, meaning: str, limits: Limits | None = None) -> Value:
    """One setting of a schema class. A list or a dict as default is copied for each instance."""
    metadata = {"description": meaning, **(limits or {})}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return dataclasses.field(default=default, metadata=metadata)


def same_as(key: str, meaning: str, limits: Limits | None = None) -> Any:
    """A setting that follows another until it is given; resolved when the configuration is composed."""
    return setting(f"${{{key}}}", meaning, limits)


def part(section: Callable[[], Value]) -> Value:
    """A nested schema class with its own defaults."""
    return dataclasses.field(default_factory=section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as declared. `type` and `allowed` are for people ("float or null", "at least 1"), `default` as YAML
    has it."""

    key: str
    type: str
    default: Any
    meaning: str
    allowed: str


def settings_of(schema: type, prefix: str = "") -> Iterator[Setting]:
    """All settings of a schema class in the order of declaration, nested ones under their dotted key."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key, hint = prefix + field.name, hints[field.name]
        section = _section(hint)
        if section is not None:
            yield from settings_of(section, f"{key}.")
        else:
            yield Setting(
                key=key,
                type=_type_name(hint),
                default=_default(field),
                meaning=field.metadata["description"],
                allowed=_allowed(hint, field.metadata),
            )


def value_of(config: object, key: str) -> Any:
    """The value at a dotted key; None where a section on the way is None."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None if value is None else getattr(value, name)
    return value


def with_values(config: Value, values: Mapping[str, Any]) -> Value:
    """A copy in which the settings of these dotted keys have these values. They are not checked."""
    changed: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        before = changed.get(name, config[name] if isinstance(config, dict) else getattr(config, name))
        changed[name] = with_values(before, {rest: value}) if rest else value
    if isinstance(config, dict):
        return {**config, **changed}  # type: ignore[return-value]
    return dataclasses.replace(config, **changed)  # type: ignore[type-var]


def as_typed(value: object) -> str:
    """As on a command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _options(hint: Any) -> tuple[Any, ...]:
    """Of `float | None` both; of anything else that alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _section(hint: Any) -> type | None:
    return next((o for o in _options(hint) if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def _type_name(hint: Any) -> str:
    if len(options := _options(hint)) > 1:
        return " or ".join(map(_type_name, options))
    kind = typing.get_origin(hint)
    if kind is list:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    if kind in (dict, typing.Literal):
        return "mapping" if kind is dict else "str"
    return "null" if hint is type(None) else str(hint.__name__)


def _allowed(hint: Any, limits: Mapping[str, Any]) -> str:
    """To be read after "allowed:"; "" where any value of the type is."""
    choices = [
        one for option in _options(hint) if typing.get_origin(option) is typing.Literal for one in option.__args__
    ]
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    bounds = " and ".join(f"{words[one]} {limits[one]:.15g}" for one in words if limits.get(one) is not None)
    told = limits.get("form") or ", ".join(choices) or bounds
    return f"{told}, {limits['why']}" if limits.get("why") else told


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def default_values(schema: type) -> dict[str, Any]:
    """Of each setting, by sections, as YAML has them. The caller may change them."""
    return copy.deepcopy(_default_values(schema))


@functools.cache  # a composition asks twice, and reading the hints of the whole schema took a seventh of its time
def _default_values(schema: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in settings_of(schema):
        *sections, name = one.key.split(".")
        section = found
        for part_name in sections:
            section = section.setdefault(part_name, {})
        section[name] = one.default
    return found
