"""Composes the overrides of the command line into one typed RunConfig.

With `launcher.__main__` and `launcher.config.hydra_messages`, the only home of Hydra and OmegaConf: what comes out is a
plain object, and nothing below sees a DictConfig.
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
from omegaconf.errors import ValidationError
from yaml import YAMLError

from launcher.base.errors import ConfigError
from launcher.config import hydra_plugin
from launcher.config.data import FURTHER, FurtherConfig, HeldOutConfig
from launcher.config.hydra_messages import deleted, explain, unknown_key
from launcher.config.retired import accept_retired, drop_retired
from launcher.config.schema import RunConfig
from launcher.config.settings import Duration, settings_of

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = REPOSITORY / "conf"
CONFIG_NAME = "config"
LONGEST_SHOWN = 80
"""Characters of a value that is no path."""

YAML_SWITCHES = {"True": "on", "False": "off"}
"""YAML 1.1 reads a bare `on` or `off` as a boolean, so `recover: {mode: on}` in a preset arrives as "True"."""
NUMBER = re.compile(r"[\d_.]*\d[\d_.]*([eE][+-]?\d[\d_]*)?")
"""What Hydra may take for one."""


@functools.cache
def register() -> None:
    """Make the schema and the resolver `${repo:…}` (a path below the repository's root) known to Hydra."""
    OmegaConf.register_new_resolver("repo", _below_repository, replace=True)
    # A held-out data set is a section like any other here, so that `valid_dataset.path=…` can be given where the
    # preset has none: Hydra can't override below a section that is null.
    schema = accept_retired(RunConfig(valid_dataset=HeldOutConfig()))
    ConfigStore.instance().store(name="schema", node=schema)
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


@functools.cache
def _texts() -> frozenset[str]:
    """The settings that take a text as it is typed."""
    return frozenset(
        one.key
        for one in settings_of(RunConfig)
        if one.type.startswith("str") and not isinstance(one.allowed, Duration)
    )


def as_typed_texts(overrides: Sequence[str]) -> list[str]:
    """The overrides, with quotes around a text that Hydra would take for a number and write another way: `2026_11_26`
    would be 20261126, `3.10` 3.1, and of a commit `12e4567` infinity, which many names share."""

    def quoted(override: str) -> str:
        key, equals, value = override.partition("=")
        if key.lstrip("+") not in _texts():
            return override
        return key + equals + ",".join(f'"{one}"' if NUMBER.fullmatch(one) else one for one in value.split(","))

    return [quoted(one) for one in overrides]


def compose(overrides: Sequence[str]) -> RunConfig:
    """The RunConfig of a command line, for scripts and tests. Raises ConfigError; not checked
    (`launcher.resources.config_checks`)."""
    register()
    find_own_presets(overrides)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_FOLDER)):
        try:
            composed = hydra.compose(CONFIG_NAME, overrides=as_typed_texts(overrides))
        except Exception as error:  # Hydra raises ValueErrors and assertions beside its own kinds
            raise explain(error, overrides) from error
    return to_run_config(composed)


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


def to_run_config(composed: DictConfig) -> RunConfig:
    """Resolve, convert and complete a composed configuration, once. Raises ConfigError."""
    try:
        drop_retired(composed)
        _refuse_other_keys(composed)
        _drop_absent_held_out(composed)
        _complete_further(composed)
        missing = sorted(OmegaConf.missing_keys(composed))
        config = None if missing else cast(RunConfig, OmegaConf.to_object(composed))
    except ConfigError:
        raise
    except Exception as error:  # resolvers raise what they like, and at the first look at what they are in
        raise explain(error) from error
    if config is None:
        raise ConfigError(f"no value for {', '.join(missing)}", f"set it in the preset, or here: {missing[0]}=…")
    return _completed(config)


def _refuse_other_keys(composed: DictConfig) -> None:
    """`+actor.foo=1` and `~seed` pass Hydra, and would then have no effect, or its default, silently."""
    names = {setting.key for setting in settings_of(RunConfig)}
    for name in sorted({name.partition(".")[0] for name in names} - composed.keys()):
        raise deleted(name)
    for key in _keys(OmegaConf.to_container(composed), names):
        is_null_section = any(name.startswith(f"{key}.") for name in names)
        if key not in names and not is_null_section:
            raise unknown_key(key, f"+{key}")


def _keys(node: Any, settings: set[str], prefix: str = "") -> Iterator[str]:
    if not isinstance(node, Mapping) or prefix[:-1] in settings:
        yield prefix[:-1]
        return
    for name, value in node.items():
        yield from _keys(value, settings, f"{prefix}{name}.")


def _drop_absent_held_out(composed: DictConfig) -> None:
    """No held-out data set is meant where nothing of it was given."""
    absent = OmegaConf.to_container(OmegaConf.structured(HeldOutConfig))
    held_out = composed.valid_dataset
    if not isinstance(held_out, DictConfig | None):  # an interpolation of a text, which OmegaConf lets pass
        raise ConfigError(f"valid_dataset={held_out}: a section of settings, not a value", "set valid_dataset.path=…")
    if held_out is not None and OmegaConf.to_container(held_out) == absent:
        composed.valid_dataset = None


def _complete_further(composed: DictConfig) -> None:
    """Each further data set with all its settings."""
    known = {field.name for field in dataclasses.fields(FurtherConfig)}
    for key in FURTHER:
        for name, given in composed[key].items():
            if not isinstance(given, DictConfig):
                raise ConfigError(f"{key}.{name}={given}: a data set is needed", f"set {key}.{name}.path")
            for wrong in sorted({str(field) for field in given} - known):
                raise unknown_key(f"{key}.{name}.{wrong}", f"+{key}.{name}.{wrong}")
            try:
                composed[key][name] = OmegaConf.merge(OmegaConf.structured(FurtherConfig), given)
            except ValidationError as error:
                what = str(error).splitlines()[0]
                hint = f"correct {key}.{name} (docs/data_rewards_episodes.md)"
                raise ConfigError(f"{key}.{name}: {what}", hint) from error


def _completed(config: RunConfig) -> RunConfig:
    """Paths made absolute: an actor may work in another folder than the one the command was given in."""
    if not config.cluster.fileroot.strip():  # it would be the folder that the command is given in
        raise ConfigError("cluster.fileroot is empty", "name a folder for the checkpoints and logs, or leave it out")
    config.cluster.fileroot = _absolute(config.cluster.fileroot, key="cluster.fileroot")
    config.trainer.cwd = _absolute(config.trainer.cwd, key="trainer.cwd")
    config.recover.mode = YAML_SWITCHES.get(config.recover.mode, config.recover.mode)
    for key, model in (("actor.path", config.actor), ("ref.path", config.ref)):
        model.path = local_or_name(model.path, key=key)
    for key, dataset in config.datasets().items():
        dataset.path = local_or_name(dataset.path, key=f"{key}.path")
    config.sglang.model_path = local_or_name(config.sglang.model_path, key="sglang.model_path")
    config.tokenizer_path = local_or_name(config.tokenizer_path, key="tokenizer_path")
    if config.reward.canaries is not None:
        config.reward.canaries = local_or_name(config.reward.canaries, key="reward.canaries")
    if config.chat.template is not None:
        config.chat.template = local_or_name(config.chat.template, key="chat.template")
    return config


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
