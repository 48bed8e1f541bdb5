"""`python -m launcher init my_run.yaml [conf=<preset>]`: writes a preset of your own, which `conf=my_run` finds.

The file has every value that the preset sets and those that data of one's own needs, each with its meaning beside it.
It builds on that preset: a line that is deleted has the preset's value again.

Exit codes: 0 written; 2 the command is wrong, and nothing was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.base.durable import replace_file
from launcher.base.errors import StorageError, UsageError
from launcher.base.yaml_text import load_yaml
from launcher.config.compose import CONFIG_FOLDER, presets
from launcher.config.hydra_arguments import is_plain_text
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of
from launcher.reporting.terminal_text import as_far_as_it_is_read

COMMAND = "init"
USAGE = f"usage: python -m launcher {COMMAND} my_run.yaml [conf=<preset to begin with>]"
FIRST = "arithmetic_cpu"
"""The preset that runs everywhere."""
ALWAYS = (
    "seed",
    "train_dataset.prompt_key",
    "train_dataset.messages_key",
    "train_dataset.answer_key",
    "reward.fn",
)
"""Written even where the preset leaves them at their defaults: data of one's own needs them first."""
MEANING_COLUMN = 44
"""Where meanings begin, so that most of them stand below each other."""


def run(arguments: Sequence[str]) -> int:
    """Raises UsageError where the name can't be one, or is taken; StorageError where the file can't be written."""
    if {"-h", "--help"} & set(arguments):
        with as_far_as_it_is_read():
            print(f"{__doc__}\n{USAGE}")
        return 0
    names = [word for word in arguments if not word.startswith("conf=")]
    bases = [word.removeprefix("conf=") for word in arguments if word.startswith("conf=")] or [FIRST]
    if len(names) != 1 or len(bases) != 1:
        raise UsageError("init needs the name of one file, and takes at most one conf=", USAGE)
    path = new_preset(names[0], bases[0])
    with as_far_as_it_is_read():
        print(f"wrote {path}, built on conf={bases[0]}. Edit it, then:")
        print(f"  python -m launcher conf={path.stem} dry_run=true")
        print(f"  python -m launcher conf={path.stem}")
    return 0


def new_preset(name: str, base: str) -> Path:
    """Write `name`, a file in the working folder, from the preset `base`. Raises as `run`."""
    path = Path(name)
    if path.suffix != ".yaml" or path.name != name or not path.stem.isidentifier() or not is_plain_text(path.stem):
        raise UsageError(
            f"{name} is no name of a preset: it must be a file of this folder, of letters (a to z), digits and _, with "
            ".yaml, and no word with a meaning of its own (true, null, nan)",
            f"python -m launcher {COMMAND} my_run.yaml",
        )
    if path.stem in presets():
        raise UsageError(f"{path.stem} is a preset of the launcher", "choose another name")
    if base not in presets():
        raise UsageError(f"conf={base}: there is no such preset", f"presets: {', '.join(presets())}")
    try:
        if path.exists():
            raise UsageError(f"{name} exists, and is not overwritten", "choose another name, or move it")
        replace_file(path, text_of(path.stem, base).encode())
    except OSError as error:
        raise StorageError(
            f"{name} can't be written: {error.strerror}", "write it into another folder, under a short name"
        ) from error
    return path


def text_of(name: str, base: str) -> str:
    """The new preset's text. Its experiment is called as its file: two presets must not share a folder of results."""
    settings = list(settings_of(RunConfig))
    meanings = {one.key: one.meaning for one in settings}
    values: dict[str, Any] = {}
    for one in settings:
        if one.key in ALWAYS:
            _merge(values, _nested(one.key, one.default))
    _merge(values, {**values_of(base), "experiment_name": name})
    return "\n".join(
        [
            "# @package _global_",
            f"# A preset of your own, built on {base}. In this file's folder: `python -m launcher conf={name}`.",
            f"# Every value is that of {base} until you change it; a line that is deleted has it again.",
            f"# All settings: `python -m launcher conf={name} --cfg job`.",
            "defaults:",
            f"  - {base}",
            "  - _self_",
            "",
            *_lines(_in_order(values, list(meanings)), meanings),
            "",
        ]
    )


def values_of(preset: str) -> dict[str, Any]:
    """What a preset and those that it builds on set, as their files have it (`${…}` stays)."""
    own = load_yaml((CONFIG_FOLDER / "conf" / f"{preset}.yaml").read_text())
    bases = [one for one in own.pop("defaults", []) if one != "_self_"]
    merged: dict[str, Any] = {}
    for values in (*map(values_of, bases), own):
        _merge(merged, values)
    return merged


def _nested(key: str, value: object) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


def _in_order(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """As the schema declares them: `path` before the columns that are read from it."""

    def place(prefix: str) -> int:
        found = (number for number, key in enumerate(keys) if key == prefix or key.startswith(f"{prefix}."))
        return next(found, len(keys))

    def ordered(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        inner = {
            name: ordered(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
            for name, value in section.items()
        }
        return dict(sorted(inner.items(), key=lambda item: place(prefix + item[0])))

    return ordered(values, "")


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _lines(values: Mapping[str, Any], meanings: Mapping[str, str], prefix: str = "", indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in meanings:
            yield f"{indent}{key}:"
            yield from _lines(value, meanings, f"{name}.", indent + "  ")
        else:
            style = '"' if isinstance(value, str) and "\n" in value else None  # as others, on one line
            written = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10_000)
            written = written.removesuffix("...\n").strip()
            yield f"{indent}{key}: {written}".ljust(MEANING_COLUMN) + f"  # {meanings.get(name, '')}".rstrip(" #")
