"""Rewrites the errors of Hydra and OmegaConf as one message: which word can't be composed, why, and what to write.

Their errors carry most of that as text only, so the text of the complete chain is searched. What no rule matches is
shown unchanged. Values and keys are not looked at here: `launcher.config.validation` checks what was composed.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import OverrideParseException

from launcher.base.errors import ConfigError
from launcher.config.data import FURTHER
from launcher.config.hydra_arguments import unreadable, written_as_text
from launcher.config.validation import known_keys, setting_at

HELP = "how to write one: python -m launcher --help, and conf/conf/ for examples"
OF_HYDRA = "hydra.* are Hydra's own settings, and no run needs one: leave it out (with --cfg hydra it lists them)"
HELD_OUT = "valid_dataset"


def explain(error: BaseException, overrides: Sequence[str] = ()) -> ConfigError:
    """The one error of ours for what composing a configuration from `overrides` raised."""
    if isinstance(error, yaml.YAMLError):
        return ConfigError(f"a preset is not valid YAML: {_one_line(str(error))}", "correct the file at that line")
    for link in _chain(error):
        if isinstance(link, OverrideParseException):
            return unreadable(re.sub(r"^\+\+(?=\w)", "", str(link.override)))
    for override in overrides:
        if re.match(r"[+~]*(@[^=]*)?=", override):  # Hydra takes it for the complete configuration, and fails anywhere
            return unreadable(override)
    text = "\n".join(str(link) for link in _chain(error))
    for pattern, say in RULES:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return say(found, "\n".join([text, *(f"override: {override}" for override in overrides)]))
    return ConfigError(f"the configuration can't be composed: {without_classes(_one_line(text))}", HELP)


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a setting that is written as an option."""
    for argument in itertools.takewhile("--".__ne__, arguments):
        key, _, value = argument.lstrip("-").partition("=")
        key = key.replace("-", "_")
        if argument.startswith("--") and (key in known_keys() or key == "conf"):
            value = value or "true" * (key == "dry_run")
            instead = f"{key}={value or '…'}"
            raise ConfigError(f"{argument}: a setting has no dashes before it", f"write {shlex.quote(instead)}")


def refuse_options(arguments: Sequence[str]) -> None:
    """Raises ConfigError for options that Hydra does not know; its parser would answer with all of its usage."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001
        words = message.split() if message.startswith("unrecognized") else []
        near = [flag for word in words for flag in difflib.get_close_matches(word, flags, n=1)]
        hint = f"did you mean {', '.join(near)}?" if near else "`python -m launcher --help` lists the options"
        raise ConfigError(message, hint)

    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args(arguments)


def deleted(key: str) -> ConfigError:
    """`~key` was given."""
    instead = f"write {HELD_OUT}=null for none" if key == HELD_OUT else "give it another value instead"
    return ConfigError(f"~{key}: a setting can't be deleted", instead)


def _unknown_preset(found: re.Match[str], text: str) -> ConfigError:
    group, name = found.groups()
    near = difflib.get_close_matches(name, options := _options(text), n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    if group != "conf":
        return ConfigError(f"unknown {group}={name}; allowed: {', '.join(options)}", hint.strip())
    return ConfigError(
        f"unknown preset {group}={name}; presets: {', '.join(options)}",
        f"{hint}A preset of your own is <name>.yaml in the working folder, as `python -m launcher init` writes it, or "
        "<folder>/conf/<name>.yaml with --config-dir <folder>",
    )


def _unknown_override(found: re.Match[str], text: str) -> ConfigError:
    """An entry of a mapping, or a key of Hydra's own: any other is refused later, with all mistakes."""
    key = found.group(1)
    given = re.search(rf"override: (\+*{re.escape(key)}=.*)", text)
    if key.partition(".")[0] == "hydra":
        return ConfigError(f"unknown key {given.group(1) if given else key}", OF_HYDRA)
    setting = setting_at(key)
    if setting is not None and setting.key == key and key.partition(".")[0] not in FURTHER:
        if setting.type == "mapping":
            return ConfigError(f"{key}: its entries are given one by one", f"for each, write +{key}.NAME=VALUE")
        what = f"{key}: a key below a section that the preset sets to null can't be given"
        return ConfigError(what, "take the null out of the preset")
    return ConfigError(f"{key} is not there yet", f"to add it, write +{key}=…")


def _of_hydra(found: re.Match[str], text: str) -> ConfigError:
    refusal, key = found.groups()
    given = re.search(rf"Error merging override (.*?{re.escape(key)}=[^\n]*)", text)
    return ConfigError(f"{given.group(1) if given else key}: {refusal[0].lower() + refusal[1:]}", OF_HYDRA)


def no_settings(overrides: Sequence[str]) -> ConfigError:
    """A preset's values came below the name of its group."""
    preset = next((one.replace("=", "/", 1) for one in overrides if one.startswith("conf=")), "conf")
    return ConfigError(
        f"the preset {file_of(preset)} is empty, or its first line is not `# @package _global_`",
        "begin it with that line: a preset sets keys of the complete configuration",
    )


def file_of(preset: str) -> str:
    """Of `conf/my_run`: one that was found in the working folder (`python -m launcher init`) is no file of conf/."""
    group, _, name = preset.rpartition("/")
    stored = ConfigStore.instance().repo.get(group, {})
    return f"{name if f'{name}.yaml' in stored else preset}.yaml"


def _already_there(found: re.Match[str], text: str) -> ConfigError:
    key = found.group(1)
    return ConfigError(
        f"+{key}: this key is there already, and + adds a new one",
        f"leave the + out: {key}=…",
    )


def _several_values(found: re.Match[str], text: str) -> ConfigError:
    given = found.group(1).removeprefix("++")  # as of an unknown key (launcher.config.compose)
    key, _, value = given.partition("=")
    setting = setting_at(key)
    is_text = setting is not None and setting.type.startswith("str")
    in_one = written_as_text(key, value) if is_text else "for a list write 'key=[a,b]'"
    return ConfigError(f"{given}: several values for one run", f"add -m to run one after the other; {in_one}")


def _no_base(found: re.Match[str], text: str) -> ConfigError:
    file, base = found.groups()
    return ConfigError(
        f"{file_of(file)} is built on {base.removeprefix('conf/')} (defaults), and there is no such preset",
        "name a preset of the launcher there, or a .yaml of the working folder",
    )


def _no_group(found: re.Match[str], text: str) -> ConfigError:
    key = found.group(1) or "conf"
    return ConfigError(
        f"{key} can't be set: there is no group of presets of that name, or the value is no name",
        "the groups are conf=<preset> and hardware=auto; all else is key=value",
    )


def without_classes(text: str) -> str:
    """Names of a parser's and of Python's classes are no help to who typed the argument."""
    return re.sub(r"\b(?:\w+\.)*\w+(?:Exception|Error)\b(?: raised while \w+ing \w+:?| while|:)? *", "", text)


def _reworded(message: str, hint: str) -> Callable[[re.Match[str], str], ConfigError]:
    """A fixed message. In it {0} is what the pattern found, {1} its first group, {key} the key that Hydra names."""

    def say(found: re.Match[str], text: str) -> ConfigError:
        key = re.search(r"full_key: (\S+)", text)
        names = {"key": key.group(1) if key else "a value", "options": ", ".join(_options(text))}
        first = without_classes(_one_line(found.group(0)))
        return ConfigError(message.format(first, *found.groups(), **names), hint)

    return say


RULES: tuple[tuple[str, Callable[[re.Match[str], str], ConfigError]], ...] = (
    (
        r"You must specify 'conf'|Could not find 'conf/'",
        _reworded(
            "no preset named; presets: {options}",
            "python -m launcher conf=<preset> [key=value …]; with dry_run=true it only shows its plan",
        ),
    ),
    (r"Could not find '(\w+)/([^']+)'", _unknown_preset),
    (
        r"Additional config directory '([^']+)' not found",
        _reworded("--config-dir: there is no folder {1}", "a preset of your own is <folder>/conf/<name>.yaml"),
    ),
    (r"Could not delete (?:from config\. (?:The value of )?)?'([^']*)'", lambda found, _: deleted(found.group(1))),
    (r"In '([^']+)': Could not load '([^']+)'", _no_base),
    (
        r"maximum recursion depth exceeded",
        _reworded("a preset is built on itself", "correct `defaults` in it, and in those that it names"),
    ),
    (r"Could not append to config\. An item is already at '([^']+)'", _already_there),
    (
        r"Override (\S+?)=[^\n]* looks like a config group override|Config group override must be a string[^\n]*",
        _no_group,
    ),
    (
        r"Cannot find primary config '([^']*)'|Primary config .*?exists and readable|Primary config [^\n]*",
        _reworded("--config-name or --config-path: {0}", "leave it out; a preset of your own: --config-dir <folder>"),
    ),
    (
        r"(?:Sweeping over Hydra's configuration|Sweep over Hydra)[^\n]*",
        _reworded("{0}", OF_HYDRA),
    ),
    (r"Ambiguous value for argument '([^\n]*)'", _several_values),
    (r"Could not override '([^']+)'", _unknown_override),
    (r"((?:Value |field |Invalid type |Invalid value |Cannot convert |Key )[^\n]*)\s+full_key: (\S+)", _of_hydra),
)
"""First match wins."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _options(text: str) -> list[str]:
    """What Hydra lists, one indented name a line, after the word "options"."""
    listed = re.search(r"vailable options[^\n]*\n((?:\t\S+\n?)*)", text)
    return sorted(listed.group(1).split()) if listed else []


def _one_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return "; ".join(
        line
        for line in lines
        if line and not line.startswith(("See http", "full_key", "object_type", "reference_type"))
    )
