"""Checks values against what the settings allow, by pydantic: every wrong value and every unknown key is found at once.

Pydantic reads types and limits from the dataclasses of `schema` and `settings`. Its errors become findings, each
with the key, the value that was found, and what is allowed. Contradictions between values are in
`launcher/resources/config_checks.py`, which reports them in the same form.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from launcher.base.errors import ConfigError
from launcher.base.findings import Finding, Severity
from launcher.config.data import FURTHER, FurtherConfig
from launcher.config.other_names import name_here
from launcher.config.schema import RunConfig
from launcher.config.settings import MISSING, Setting, settings_of

MOST_NAMES = 20
"""Of a section's keys: more of them are no help in one line."""
EVERY_KEY = "Every key with its default: docs/configuration.md, or `python -m launcher conf=<preset> --cfg job`"
SECRET = ("alerts.webhook",)
NOT_SHOWN = "(not shown)"
OUT_OF_RANGE = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"),
    *("literal_error", "string_pattern_mismatch"),
)
"""Pydantic's names of errors where the type is right."""
UNKNOWN = "unexpected_keyword_argument"


def config_problem(key: str, given: object, allowed: str, hint: str = "") -> Finding:
    """One setting that can't be used: `allowed` is what would be, "" where there is no such setting."""
    if given == MISSING:
        return Finding(subject=f"no value for {key}", text=allowed, level=Severity.BAD, hint=hint)
    subject = f"{'' if allowed else 'unknown key '}{key}={'null' if given is None else given}"
    return Finding(subject=subject, text=allowed, level=Severity.BAD, hint=hint)


def refuse(problems: Sequence[Finding]) -> None:
    """Raises ConfigError with every problem there is."""
    every_key = EVERY_KEY if any(not one.text for one in problems) else ""
    if len(problems) == 1:
        hint = problems[0].hint or ("" if every_key else f"change {problems[0].subject.partition('=')[0]}")
        end = "." if hint and every_key and not hint.endswith("?") else ""
        raise ConfigError(str(problems[0]), f"{hint}{end} {every_key}".strip())
    if problems:
        listed = "".join(f"\n  {one}{f'; {one.hint}' if one.hint else ''}" for one in problems)
        hint = f"change the key that each line names. {every_key}".strip(". ")
        raise ConfigError(f"{len(problems)} settings can't be used:{listed}", hint)


@functools.cache
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def validated(values: Mapping[str, Any]) -> tuple[RunConfig | None, dict[str, Finding]]:
    """The settings of `values` (by sections), or what is wrong with them, by key."""
    try:
        return _adapter().validate_python(values), {}
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        found = (problem for one in errors for problem in _problems(one["type"], _key(one["loc"]), one["input"]))
        return None, dict(found)  # each wrong entry of a list is an error


def _key(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place))


def _problems(kind: str, key: str, given: Any) -> Iterator[tuple[str, Finding]]:
    if kind != UNKNOWN:
        yield wrong_value(key, given, is_out_of_range=kind in OUT_OF_RANGE)
    elif isinstance(given, Mapping) and given:  # of an unknown section: each of its keys, as it was given
        for name, value in given.items():
            yield from _problems(kind, f"{key}.{name}", value)
    else:
        yield key, unknown_key(key, given)


def wrong_value(key: str, given: object, *, is_out_of_range: bool = False) -> tuple[str, Finding]:
    """`is_out_of_range`: its type is right."""
    setting = setting_at(key)
    if setting is None:
        inside = next((one for one in known_keys() if one.startswith(f"{key}.")), f"{key}.path")
        hint = f"set one of its keys, e.g. {inside}=…, or leave it out"
        return key, config_problem(key, given, "a section of settings, not a value", hint)
    allowed = f"allowed: {setting.allowed}" if setting.allowed else ""
    if not is_out_of_range:
        allowed = ", ".join(one for one in (f"of type {setting.type}", allowed) if one)
    given = NOT_SHOWN if setting.key in SECRET else given
    return setting.key, config_problem(setting.key, given, f"{allowed} ({setting.meaning})")


def setting_at(key: str) -> Setting | None:
    """The setting of a dotted key, or of a list or mapping that the key is an entry of; None: there is none."""
    settings = _settings_about(key)
    while key not in settings and "." in key:
        key = key.rpartition(".")[0]
    return settings.get(key)


def _settings_about(key: str) -> Mapping[str, Setting]:
    """Those of a further data set, where the key is below one; else all."""
    first, *below = key.split(".")
    return _by_key(FurtherConfig, f"{first}.{below[0]}.") if first in FURTHER and below else _settings()


@functools.cache
def _settings() -> Mapping[str, Setting]:
    return _by_key(RunConfig)


def _by_key(schema: type, prefix: str = "") -> Mapping[str, Setting]:
    return {one.key: one for one in settings_of(schema, prefix)}


def known_keys() -> Sequence[str]:
    return list(_settings())


def unknown_key(key: str, given: object) -> Finding:
    """No setting has this key; what it is called here, else the nearest ones, by spelling or by their last name, are
    offered, else those of its section."""
    if (instead := name_here(key)) is not None:
        hint = f"set {instead}"
    elif near := nearest(key):
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = _section_of(key)
    return config_problem(key, given, "", hint)


def _section_of(key: str) -> str:
    section = key.rpartition(".")[0]
    names = [name.removeprefix(f"{section}.") for name in known_keys() if name.startswith(f"{section}.")]
    return f"{section} has {', '.join(names)}." if 0 < len(names) <= MOST_NAMES else ""


def nearest(key: str) -> list[str]:
    """At most three known keys: those that end in the same name first, then those that look alike."""
    known, last = list(_settings_about(key)), key.rpartition(".")[2]
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    same_name.sort(key=lambda name: -difflib.SequenceMatcher(None, key, name).ratio())
    alike = difflib.get_close_matches(key, known, n=3, cutoff=0.75)
    return list(dict.fromkeys([*same_name, *alike]))[:3]
