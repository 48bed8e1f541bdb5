"""Rewrites the errors of Hydra and OmegaConf as one message: the key, the given value, what is allowed.

Their errors carry most of that as text only (a preset's errors lose the exception they came from), so the text of
the complete chain is searched. What no rule matches is shown unchanged.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import OverrideParseException

from launcher.base.errors import ConfigError
from launcher.config.hydra_arguments import unreadable, written_as_text
from launcher.config.other_names import name_here
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of

HELP = "how to write one: python -m launcher --help, and conf/conf/ for examples"
OF_HYDRA = "hydra.* are Hydra's own settings, and no run needs one: leave it out (with --cfg hydra it lists them)"
HELD_OUT = "valid_dataset"
MOST_NAMES = 20
"""Of a section's keys: more of them are no help in one line."""
EVERY_KEY = "Every key with its default: docs/configuration.md, or `python -m launcher conf=<preset> --cfg job`"


def explain(error: BaseException, overrides: Sequence[str] = ()) -> ConfigError:
    """The one error of ours for what composing a configuration from `overrides` raised."""
    if isinstance(error, yaml.YAMLError):
        return ConfigError(f"a preset is not valid YAML: {_one_line(str(error))}", "correct the file at that line")
    for link in _chain(error):
        if isinstance(link, OverrideParseException):
            return unreadable(str(link.override))
    for override in overrides:
        if re.match(r"[+~]*(@[^=]*)?=", override):  # Hydra takes it for the complete configuration, and fails anywhere
            return unreadable(override)
    text = "\n".join(str(link) for link in _chain(error))
    for pattern, say in RULES:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return say(found, "\n".join([text, *(f"override: {override}" for override in overrides)]))
    return ConfigError(f"the configuration can't be composed: {_without_classes(_one_line(text))}", HELP)


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a setting that is written as an option, which argparse answers with its usage alone."""
    for argument in itertools.takewhile("--".__ne__, arguments):
        key, _, value = argument.lstrip("-").partition("=")
        if argument.startswith("--") and (key in _known() or key == "conf"):
            instead = f"{key}={value or '…'}"
            raise ConfigError(f"{argument}: a setting has no dashes before it", f"write {shlex.quote(instead)}")


def unknown_key(key: str, given: str) -> ConfigError:
    """No setting has this key; what it is called here, else the nearest ones, by spelling or by their last name, are
    offered, else those of its section."""
    if (instead := name_here(key)) is not None:
        return ConfigError(f"unknown key {key} (given: {given})", f"set {instead}")
    hint = f"did you mean {' or '.join(near)}? " if (near := nearest(key)) else _section_of(key)
    return ConfigError(f"unknown key {key} (given: {given})", hint + EVERY_KEY)


def deleted(key: str) -> ConfigError:
    """`~key` was given."""
    instead = f"write {HELD_OUT}=null for none" if key == HELD_OUT else "give it another value instead"
    return ConfigError(f"~{key}: a setting can't be deleted", instead)


def _section_of(key: str) -> str:
    section = key.rpartition(".")[0]
    names = [name.removeprefix(f"{section}.") for name in _known() if name.startswith(f"{section}.")]
    return f"{section} has {', '.join(names)}. " if 0 < len(names) <= MOST_NAMES else ""


def nearest(key: str) -> list[str]:
    """At most three known keys: those that end in the same name first, then those that look alike."""
    known = _known()
    last = key.rpartition(".")[2]
    same_name = [name for name in known if name.rpartition(".")[2] == last]
    same_name.sort(key=lambda name: -difflib.SequenceMatcher(None, key, name).ratio())
    alike = difflib.get_close_matches(key, known, n=3, cutoff=0.75)
    return list(dict.fromkeys([*same_name, *alike]))[:3]


def _known() -> list[str]:
    return [setting.key for setting in settings_of(RunConfig)]


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
    key = found.group(1)
    mappings = [setting.key for setting in settings_of(RunConfig) if setting.type == "mapping"]
    if key in mappings:
        return ConfigError(f"{key}: its entries are given one by one", f"for each, write +{key}.NAME=VALUE")
    if key.startswith(tuple(f"{mapping}." for mapping in mappings)):
        return ConfigError(f"{key} is not there yet", f"to add it, write +{key}=…")
    given = re.search(rf"override: (\+*{re.escape(key)}=.*)", text)
    return unknown_key(key, given.group(1) if given else key)


def file_of(preset: str) -> str:
    """Of `conf/my_run`: one that was found in the working folder (`python -m launcher init`) is no file of conf/."""
    group, _, name = preset.rpartition("/")
    stored = ConfigStore.instance().repo.get(group, {})
    return f"{name if f'{name}.yaml' in stored else preset}.yaml"


def _unknown_in_preset(found: re.Match[str], text: str) -> ConfigError:
    file, key = found.groups()
    if key != Path(file).parent.name:
        return unknown_key(key, f"in {file_of(file)}")
    return ConfigError(
        f"the preset {file_of(file)} is empty, or its first line is not `# @package _global_`",
        "begin it with that line: a preset sets keys of the complete configuration",
    )


def _wrong_type(found: re.Match[str], text: str) -> ConfigError:
    refusal, key = found.groups()
    where = re.search(r"In '([^']+)': \w+ raised while", text)
    place = f" (in {file_of(where.group(1))})" if where else ""
    settings = {setting.key: setting for setting in settings_of(RunConfig)}
    given = re.search(rf"Error merging override (.*?{re.escape(key)}=[^\n]*)", text)
    problem = "null is not allowed" if "is not Optional" in refusal else refusal[0].lower() + refusal[1:]
    if key not in settings:
        if (inside := next((name for name in settings if name.startswith(f"{key}.")), None)) is None:
            return ConfigError(f"{given.group(1) if given else key}{place}: {problem}", OF_HYDRA)
        return ConfigError(
            f"{key}{place}: a section of settings, not a value",
            f"set one of its keys, e.g. {inside}=…, or leave it out",
        )
    setting = settings[key]
    allowed = f", allowed: {setting.allowed}" if setting.allowed is not None else ""
    return ConfigError(
        f"{given.group(1) if given else key}{place}: {problem}",
        f"{key} is of type {setting.type}{allowed} ({setting.meaning})",
    )


def _already_there(found: re.Match[str], text: str) -> ConfigError:
    key = found.group(1)
    return ConfigError(
        f"+{key}: this key is there already, and + adds a new one",
        f"leave the + out: {key}=…",
    )


def _several_values(found: re.Match[str], text: str) -> ConfigError:
    key, _, value = found.group(1).partition("=")
    is_text = any(one.key == key and one.type.startswith("str") for one in settings_of(RunConfig))
    in_one = written_as_text(key, value) if is_text else "for a list write 'key=[a,b]'"
    return ConfigError(f"{found.group(1)}: several values for one run", f"add -m to run one after the other; {in_one}")


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


def _without_classes(text: str) -> str:
    """Names of a parser's and of Python's classes are no help to who typed the argument."""
    return re.sub(r"\b(?:\w+\.)*\w+(?:Exception|Error)\b(?: raised while \w+ing \w+:?| while|:)? *", "", text)


def _reworded(message: str, hint: str) -> Callable[[re.Match[str], str], ConfigError]:
    """A fixed message. In it {0} is what the pattern found, {1} its first group, {key} the key that Hydra names."""

    def say(found: re.Match[str], text: str) -> ConfigError:
        key = re.search(r"full_key: (\S+)", text)
        names = {"key": key.group(1) if key else "a value", "options": ", ".join(_options(text))}
        first = _without_classes(_one_line(found.group(0)))
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
    (r"Error merging override ~(\S+)", lambda found, _: deleted(found.group(1))),
    (
        r"Could not delete (?:from config\. (?:The value of )?)?'([^']*)'",
        lambda found, _: deleted(found.group(1)),
    ),
    (
        r"Missing mandatory value: (\S+)",
        _reworded("no value for {1}", "name a preset that sets it (conf=<preset>), or set it in yours"),
    ),
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
    (r"In '([^']+)': \w+ raised while composing config:\s+Key '[^\n]*\s+full_key: (\S+)", _unknown_in_preset),
    (r"((?:Value |field |Invalid type |Invalid value |Cannot convert )[^\n]*)\s+full_key: (\S+)", _wrong_type),
    (
        r"(?:Unsupported interpolation|Interpolation (?:key|to)|Recursive interp|\w+ raised while resolving)[^\n]*",
        _reworded(
            "{key}: {0}",
            "${key} takes another setting's value, ${repo:path} is a path below the launcher's own folder, "
            "${oc.env:NAME} an environment variable",
        ),
    ),
    (
        r"Unexpected type for root: NoneType",
        _reworded(
            "a key below a section that the preset sets to null can't be given", "take the null out of the preset"
        ),
    ),
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
