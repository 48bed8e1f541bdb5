"""What the launcher takes from a YAML of AReaL's: names, folders, frequencies, and which AReaL is installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import ConfigError
from launcher.config.compose import values_of
from launcher.config.foreign import ForeignTrainerConfig
from launcher.run_files.run_paths import RunPaths, login_name

AREAL = "areal"
NAMES = ("experiment_name", "trial_name")
KEYS = (
    *NAMES,
    "cluster.fileroot",
    "cluster.n_nodes",
    "allocation_mode",
    "scheduler.type",
    "total_train_steps",
    "actor.weight_update_mode",
    "cluster.name_resolve.type",
    "cluster.name_resolve.nfs_record_root",
    "recover.mode",
    *(f"{section}.freq_{unit}" for section in ("recover", "saver") for unit in ("epochs", "steps", "secs")),
)
OF_THE_TRIAL = (*NAMES, "fileroot")
"""Keys that `recover` and `saver` have again; AReaL's files lie where those of each section say."""
MODES = ("on", "auto")
RECORD_ROOT = re.compile(r'nfs_record_root: str = field\(\s*default="([^"]+)"')
"""AReaL's own default, as its source has it."""
LAUNCHERS = ("areal/infra/launcher/local.py", "areal/launcher/local.py")
"""From 0.5 or 1.0 on, and before. Seen to run: 1.0.4, the first."""
RANKS = re.compile(r"[dptc](\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArealSettings:
    """`config`: the YAML, as it was given. `values`: of KEYS."""

    config: str
    overrides: tuple[str, ...]
    values: Mapping[str, object]

    @property
    def paths(self) -> RunPaths:
        """Of its trial: the layout is that of this launcher's runs."""
        return RunPaths(
            fileroot=Path(str(self.values["cluster.fileroot"])),
            user=login_name(),
            experiment_name=str(self.values["experiment_name"]),
            trial_name=str(self.values["trial_name"]),
        )

    @property
    def recovers(self) -> bool:
        """Whether AReaL writes what it can resume from. YAML 1.1 reads a bare `on` as true."""
        return self.values["recover.mode"] in (*MODES, True) and self._is_due("recover")

    @property
    def exports(self) -> bool:
        return self._is_due("saver")

    @property
    def total_steps(self) -> int | None:
        """`total_train_steps`, which ends it before its epochs are over."""
        given = self.values["total_train_steps"]
        return given if isinstance(given, int) else None

    def records(self, python: str | None, env: Mapping[str, object]) -> Path | None:
        """The trial's entries in AReaL's name_resolve, as files: addresses of servers, and weights that are saved. None
        where neither the YAML nor the AReaL of that interpreter says where."""
        paths = self.paths
        root = self.values["cluster.name_resolve.nfs_record_root"] or _default_record_root(python, env)
        return Path(str(root)) / paths.user / paths.experiment_name / paths.trial_name if root else None

    @property
    def ranks(self) -> int:
        """Processes of its trainer, by `allocation_mode`, e.g. sglang:d4+fsdp:d2c2."""
        trains = str(self.values["allocation_mode"]).rpartition("+")[2].partition("|")[0].rpartition(":")[2]
        count = 1
        for number in RANKS.findall(trains):
            count *= int(number)
        return count

    def _is_due(self, section: str) -> bool:
        return any(self.values[f"{section}.freq_{unit}"] is not None for unit in ("epochs", "steps", "secs"))


def areal_settings(trainer: ForeignTrainerConfig) -> ArealSettings:
    """Raises ConfigError with the first thing that can't be used."""
    if trainer.config is None:
        raise ConfigError("trainer.config=null", "set it to AReaL's YAML, as after its --config")
    file = Path(trainer.cwd) / Path(trainer.config).expanduser()
    if not file.is_file() or file.suffix != ".yaml":
        raise ConfigError(f"trainer.config={trainer.config}: {file} is no YAML file", "give its path, from trainer.cwd")
    again = [f"{section}.{key}" for section in ("recover", "saver") for key in OF_THE_TRIAL]
    found = values_of(file, trainer.overrides, [*KEYS, *again])
    _check(trainer.config, found)
    return ArealSettings(config=trainer.config, overrides=tuple(trainer.overrides), values=found)


def _check(file: str, found: Mapping[str, object]) -> None:
    for key in (*NAMES, "cluster.fileroot"):
        if not found[key] or found[key] == "???":
            raise ConfigError(f"{file}: {key} has no value", f"set it there, or behind --: {key}=…")
    for section in ("recover", "saver"):
        for key in OF_THE_TRIAL:
            own, top = found[f"{section}.{key}"], found["cluster.fileroot" if key == "fileroot" else key]
            if own not in (None, top):
                raise ConfigError(f"{file}: {section}.{key}={own}, and the run's is {top}", "give both the same value")
    if found["scheduler.type"] is not None:
        raise ConfigError(
            f"{file}: scheduler.type={found['scheduler.type']}: a single controller starts its own processes",
            "start it by the local launcher (scheduler.type=null), or its command by conf=command",
        )
    if not str(found["allocation_mode"] or "").startswith(("sglang:", "vllm:")):
        raise ConfigError(
            f"{file}: allocation_mode={found['allocation_mode']}: the local launcher reads servers and trainer from it",
            "set it, e.g. allocation_mode=sglang:d1+fsdp:d1",
        )
    if found["cluster.n_nodes"] not in (None, 1):
        raise ConfigError(f"{file}: cluster.n_nodes={found['cluster.n_nodes']}", "its local launcher has one node")


def launch_module(python: str | None, env: Mapping[str, object]) -> str | None:
    """The module that is AReaL's local launcher in an environment; None where it has none. Nothing is run."""
    for folder in _import_folders(python, env):
        for file in LAUNCHERS:
            if (folder / file).is_file():
                return file.removesuffix(".py").replace("/", ".")
    return None


def areal_version(python: str | None, env: Mapping[str, object]) -> str:
    """As its package says; "" where that does not show."""
    for folder in _import_folders(python, env):
        for info in folder.glob("areal-*.dist-info"):
            return info.name.split("-")[1].removesuffix(".dist")
    return ""


def _default_record_root(python: str | None, env: Mapping[str, object]) -> str | None:
    for folder in _import_folders(python, env):
        file = folder / "areal" / "api" / "cli_args.py"
        if file.is_file() and (found := RECORD_ROOT.search(file.read_text(errors="replace"))):
            return found[1]
    return None


def _import_folders(python: str | None, env: Mapping[str, object]) -> Sequence[Path]:
    """Where that interpreter looks for packages, as far as its folder and PYTHONPATH show it."""
    given = str(env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    path = str(env.get("PATH", os.environ.get("PATH", os.defpath)))
    found = shutil.which(python or "python3", path=path)
    folders = [Path(folder) for folder in given.split(os.pathsep) if folder]
    if found is not None:
        root = Path(found).parent.parent
        folders += [*root.glob("lib/python3*/site-packages"), *root.glob("lib/python3*/dist-packages")]
    return [*folders, *(place for folder in folders for place in _edited(folder))]


def _edited(folder: Path) -> Sequence[Path]:
    """Checkouts that were installed in place, as their .pth files name them."""
    lines = [line for file in folder.glob("*areal*.pth") for line in file.read_text(errors="replace").splitlines()]
    return [Path(line) for line in lines if line.startswith("/")]
