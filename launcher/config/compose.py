"""Composes the overrides of the command line into one RunConfig: Hydra makes plain values, pydantic checks them.

With `launcher.__main__` and the other modules named after Hydra, the only home of Hydra and OmegaConf: what comes out
is a plain object, and nothing below sees a DictConfig.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from launcher.base.errors import ConfigError
from launcher.base.findings import Finding
from launcher.config import hydra_plugin
from launcher.config.data import FURTHER, FurtherConfig, HeldOutConfig
from launcher.config.hydra_messages import deleted, explain, file_of, no_settings, without_classes
from launcher.config.retired import report_retired, without_retired
from launcher.config.schema import RunConfig
from launcher.config.settings import DURATION, MISSING, Setting, default_values, value_of, with_values
from launcher.config.validation import config_problem, known_keys, refuse, setting_at, validated, wrong_value

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = REPOSITORY / "conf"
CONFIG_NAME = "config"
LONGEST_SHOWN = 80
"""Characters of a value that is no path."""

SWITCHES = {True: "on", False: "off"}
"""YAML 1.1 reads a bare `on` or `off` as a boolean, so `recover: {mode: on}` in a preset arrives as True."""
WHOLE = ("int", "int or null")
"""Of these types a number with a point is refused, as by AReaL: pydantic would take 1.0 for a whole number."""
NUMBER = re.compile(r"[\d_.]*\d[\d_.]*([eE][+-]?\d[\d_]*)?")
"""What Hydra may take for one."""
KEY = re.compile(r"\w+(\.\w+)*")
PATHS = (
    *("actor.path", "ref.path", "sglang.model_path", "tokenizer_path"),
    *("reward.canaries", "chat.template"),
)
"""Each a file or folder, or a name; as are those of the data sets."""
RESOLVERS = (
    "${key} takes another setting's value, ${repo:path} is a path below the launcher's own folder, ${oc.env:NAME} an "
    "environment variable, ${fitted:value} a memory setting's value where it can't be fitted to the GPU"
)
FITTED = "fitted"
"""The resolver that marks a preset's value: what is typed in its place is told from it."""


@functools.cache
def register() -> None:
    """Make the defaults known to Hydra, and the resolvers `${repo:…}` (a path below the repository's root) and
    `${fitted:…}`."""
    OmegaConf.register_new_resolver("repo", _below_repository, replace=True)
    OmegaConf.register_new_resolver(FITTED, lambda value: value, replace=True)
    # A held-out data set is a section like any other here, so that `valid_dataset.path=…` can be given where the
    # preset has none: Hydra can't override below a section that is null.
    ConfigStore.instance().store(name="schema", node=default_values(RunConfig))
    hydra_plugin.store()


def _below_repository(*path: object) -> str:
    """A path with commas in it is several arguments to OmegaConf, and one of digits a number."""
    return str(REPOSITORY / ",".join(map(str, path)))


def presets() -> list[str]:
    """The names that `conf=` takes."""
    return sorted(file.stem for file in (CONFIG_FOLDER / "conf").glob("*.yaml"))


def refuse_bare_preset(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a preset's name without `conf=`, as other programs take it."""
    for before, argument in itertools.pairwise(["", *itertools.takewhile("--".__ne__, arguments)]):
        is_preset = argument in presets() or (argument.isidentifier() and Path(f"{argument}.yaml").is_file())
        if is_preset and not before.startswith("-"):  # else it may be the value of an option of Hydra's
            raise ConfigError(f"{argument} is a preset's name, and no argument by itself", f"write conf={argument}")


def find_own_presets(overrides: Sequence[str]) -> None:
    """Let `conf=my_run` find my_run.yaml of the working folder, as `python -m launcher init` writes it, and those that
    it builds on. Raises ConfigError where such a file holds no settings."""
    given = (one.removeprefix("conf=").split(",") for one in overrides if one.startswith("conf="))
    names, seen = [name.strip("\"' ") for several in given for name in several], set(presets())
    while names:
        name = names.pop()
        file = Path(f"{name}.yaml")
        if name in seen or not name.isidentifier() or not file.is_file():
            continue
        seen.add(name)
        node = _own_preset(file)
        ConfigStore.instance().store(group="conf", name=name, node=node, package="_global_")
        bases = node.get("defaults")
        names += [base for base in bases if isinstance(base, str)] if isinstance(bases, ListConfig) else []


def _own_preset(file: Path) -> DictConfig:
    """Raises ConfigError."""
    try:
        node = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError) as error:  # ValueError: it is not UTF-8
        raise ConfigError(f"{file} can't be read: {' '.join(str(error).split())}", "correct it") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{file} holds no settings", "`python -m launcher init` writes a preset")
    return node


def as_hydra_takes(overrides: Sequence[str]) -> list[str]:
    """The overrides in the form in which nothing of them is lost.

    A text that Hydra would take for a number and write another way is quoted: `2026_11_26` would be 20261126, `3.10`
    3.1, and of a commit `12e4567` infinity, which many names share. An unknown key is added to what is composed, so
    that it is refused together with all other mistakes: Hydra would stop at the first.
    """
    return [_as_hydra_takes(one) for one in overrides]


def _as_hydra_takes(override: str) -> str:
    key, equals, value = override.partition("=")
    setting = setting_at(name := key.lstrip("+"))
    if setting is not None and setting.key != name and setting.type != "mapping":
        setting = None  # an entry of what has none
    if setting is not None and setting.type.startswith("str") and setting.allowed != DURATION["form"]:
        value = ",".join(f'"{one}"' if NUMBER.fullmatch(one) else one for one in value.split(","))
    is_hydras = name in ("conf", "hardware") or name.partition(".")[0] == "hydra"
    is_known = setting is not None or any(one.startswith(f"{name}.") for one in known_keys())
    is_new = equals and KEY.fullmatch(key) and not is_hydras and not is_known
    return f"{'++' if is_new else ''}{key}{equals}{value}"


def compose(overrides: Sequence[str]) -> RunConfig:
    """The RunConfig of a command line, for scripts and tests. Raises ConfigError; contradictions are not looked for
    (`launcher.resources.config_checks`)."""
    register()
    find_own_presets(overrides)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_FOLDER)):
        taken = as_hydra_takes(overrides)
        try:
            composed = hydra.compose(CONFIG_NAME, overrides=taken)
        except Exception as error:  # Hydra raises ValueErrors and assertions beside its own kinds
            raise explain(error, overrides) from error
    return to_run_config(composed, overrides)


def values_of(file: Path, overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """Of another project's YAML with Hydra's overrides, the values of some keys; None where it has none. Raises
    ConfigError."""
    began = GlobalHydra.instance().hydra  # the command line's own
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(file.parent.absolute())):
            composed = hydra.compose(file.stem, overrides=list(overrides))
        return {key: _plain(OmegaConf.select(composed, key)) for key in keys}
    except Exception as error:  # as in `compose`, and what resolvers raise
        said = " ".join(str(error).split())
        raise ConfigError(f"{file}: {said}", "correct it, or what overrides it (trainer.overrides)") from error
    finally:
        GlobalHydra.instance().hydra = began


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def to_run_config(composed: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Resolve, check and complete what Hydra composed, once. Raises ConfigError with every wrong value and key.

    `overrides`: of the command line; what is not among them comes from a preset.
    """
    for key in (one[1:].partition("=")[0] for one in overrides if one.startswith("~")):
        if key != "conf":
            raise deleted(key)  # its default would be back, silently
    raw = _merged(default_values(RunConfig), cast("dict[str, Any]", OmegaConf.to_container(composed)))
    for key in FURTHER:
        for name, given in raw[key].items() if isinstance(raw[key], dict) else ():
            if isinstance(given, dict):
                raw[key][name] = _merged(default_values(FurtherConfig), given)
    if raw["valid_dataset"] == default_values(HeldOutConfig):  # nothing of it was given: none is meant
        raw["valid_dataset"] = None
    problems: dict[str, Finding] = {}
    resolved = _resolved(OmegaConf.create(raw), raw, "", problems)
    for key in without_retired(resolved):
        report_retired(key)
    config, wrong = validated(resolved)
    found = {**wrong, **problems}
    if any(key.partition(".")[0] == "conf" for key in found):  # below the name of its group
        raise no_settings(overrides)
    causes = {key: one for key, one in found.items() if not _follows(raw, key)} or found
    refuse([_with_place(key, one, overrides) for key, one in causes.items()])
    assert config is not None, "pydantic refused nothing, and made nothing"
    return _completed(config)


def keys_to_fit(composed: DictConfig) -> list[str]:
    """The settings that are marked with `${fitted:…}`, of what `to_run_config` takes."""
    return list(_marked(cast("dict[str, Any]", OmegaConf.to_container(composed)), ""))


def _marked(section: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Over what is written, not over the settings that there are: a section may be one word, as `${saver}`."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _marked(value, f"{prefix}{name}.")
        elif isinstance(value, str) and value.startswith(f"${{{FITTED}:"):
            yield f"{prefix}{name}"


def _merged(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A section that was null, and then given in part, is complete again. What is given as missing has its default."""
    found = defaults | {key: value for key, value in given.items() if value != MISSING or key not in defaults}
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(found[key], dict):
            found[key] = _merged(default, found[key])
    return found


def _resolved(node: DictConfig, raw: Mapping[str, Any], prefix: str, problems: dict[str, Finding]) -> dict[str, Any]:
    """The plain values of a section whose values before they are resolved are `raw`. One that is missing or can't be
    resolved is left out, and is a problem."""
    found: dict[str, Any] = {}
    for name in map(str, node):
        key = f"{prefix}{name}"
        setting = setting_at(key)
        if OmegaConf.is_missing(node, name):
            meaning, hint = setting.meaning if setting else "unknown", f"set it in the preset, or here: {key}=…"
            problems[key] = config_problem(key, MISSING, meaning, hint)
            continue
        try:
            value = node[name]
            if isinstance(value, DictConfig) and not OmegaConf.is_interpolation(node, name):
                found[name] = _resolved(value, raw[name], f"{key}.", problems)
            else:
                plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
                found[name] = _as_meant(plain, setting)
                if isinstance(plain, float) and setting is not None and setting.type in WHOLE:
                    problems.update([wrong_value(key, plain)])
        except (OmegaConfBaseException, RecursionError) as error:
            what = without_classes(" ".join(str(error).splitlines()[0].split()))
            problems[key] = config_problem(key, raw[name], what, RESOLVERS)
    return found


def _follows(raw: Mapping[str, Any], key: str) -> bool:
    """Whether it has another setting's value: what is wrong with that is told of the other one."""
    setting = setting_at(key)
    default = setting.default if setting is not None else None
    return isinstance(default, str) and default.startswith("${") and value_of(raw, key) == default


def _as_meant(value: Any, setting: Setting | None) -> Any:
    """Where a boolean is no value of a setting, the word that Hydra or YAML made it of, or one that is refused."""
    if not isinstance(value, bool) or setting is None or "bool" in setting.type or setting.type == "mapping":
        return value
    return SWITCHES[value] if SWITCHES[value] in setting.allowed.split(", ") else str(value)


def _with_place(key: str, problem: Finding, overrides: Sequence[str]) -> Finding:
    """With the preset that it comes from."""
    given = {one.partition("=")[0].lstrip("+~"): one.partition("=")[2] for one in overrides}
    preset = given.pop("conf", None)
    of_command_line = any(f"{key}.".startswith(f"{typed}.") or typed.startswith(f"{key}.") for typed in given)
    is_missing = "=" not in problem.subject
    if of_command_line or is_missing or preset is None:
        return problem
    return dataclasses.replace(problem, subject=f"{problem.subject} (in {file_of(f'conf/{preset}')})")


def _completed(config: RunConfig) -> RunConfig:
    """Paths made absolute: an actor may work in another folder than the one the command was given in."""
    if not config.cluster.fileroot.strip():  # it would be the folder that the command is given in
        raise ConfigError("cluster.fileroot is empty", "name a folder for the checkpoints and logs, or leave it out")
    folders = {key: _absolute(value_of(config, key), key=key) for key in ("cluster.fileroot", "trainer.cwd")}
    given = {key: value_of(config, key) for key in (*PATHS, *(f"{key}.path" for key in config.datasets()))}
    paths = {key: local_or_name(path, key=key) for key, path in given.items() if path is not None}
    return with_values(config, {**folders, **paths})


def _absolute(folder: str, *, key: str) -> str:
    """Whether it is there or not. Raises ConfigError."""
    try:
        return str(Path(folder).expanduser().absolute())
    except RuntimeError as error:  # ~ of nobody
        raise ConfigError(f"{key}={folder}: {error}", "write the path out, beginning with /") from error


def local_or_name(path_or_name: str, *, key: str) -> str:
    """An existing file or folder as an absolute path; anything else (a hub name, a missing path) as it is. Raises
    ConfigError for what is neither a path nor a name, as the text of a chat template, or may not be looked at."""
    try:
        path = Path(path_or_name).expanduser()
        return str(path.absolute()) if path_or_name and path.exists() else path_or_name
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of nobody
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{key}={' '.join(path_or_name.split())[:LONGEST_SHOWN]}: {why}",
            "give the path of a file or folder, or a name; what a file is to hold can't be given here itself",
        ) from error
