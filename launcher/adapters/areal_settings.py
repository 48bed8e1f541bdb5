"""What the launcher takes from a YAML of AReaL's: names, folders, frequencies, servers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import ConfigError
from launcher.config.compose import values_of
from launcher.config.foreign import SERVERS, ForeignTrainerConfig
from launcher.run_files.run_paths import RunPaths, login_name

AREAL = "areal"
NAMES = ("experiment_name", "trial_name")
OF_SERVERS: Mapping[str, type | tuple[type, ...]] = {
    "model_path": str,
    "dtype": str,
    "context_length": int,
    "mem_fraction_static": (int, float),
    "max_running_requests": int,
    "random_seed": int,
}
"""Keys of `sglang` that both have, with the same meaning."""
KEYS = (
    *NAMES,
    "actor.path",
    "actor.backend",
    "rollout.backend",
    *(f"sglang.{key}" for key in OF_SERVERS),
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
SECTIONS = ("recover", "saver", "stats_logger")
"""They have the keys of the trial again; AReaL's files lie where those of each section say. The last one says where a
single controller's log is."""
DEGREES = re.compile(r"([dptc])(\d+)")
"""Of parallelism, e.g. d4t2: four copies, each over two GPUs."""
SINGLE_CONTROLLER = "local"
RESUMING_MODES = ("on", "auto", True)
"""Of `recover.mode`; YAML 1.1 reads `on` as true."""
OLD_PLACES = re.compile(
    r"(?P<servers>(sglang|vllm)[.:][dpt0-9]+)\+(?P<trains>((fsdp|megatron|archon)[.:])?[dptce0-9]+)"
)
"""An `allocation_mode` as AReaL before 1.0 wrote it too, e.g. sglang.d4p1t1+d4p1t1."""


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
    def is_single_controller(self) -> bool:
        """Whether the script starts its workers and servers itself; else AReaL's legacy launcher starts it."""
        return self.values["scheduler.type"] == SINGLE_CONTROLLER

    @property
    def recovers(self) -> bool:
        """Whether it writes what it can resume from, and does."""
        return self.values["recover.mode"] in RESUMING_MODES and self._is_due("recover")

    @property
    def exports(self) -> bool:
        return self._is_due("saver")

    @property
    def total_steps(self) -> int | None:
        """`total_train_steps`, which ends it before its epochs are over."""
        given = self.values["total_train_steps"]
        return given if isinstance(given, int) else None

    @property
    def record_root(self) -> Path:
        """Of AReaL's name_resolve, which keeps addresses of servers, and which weights are saved, as files."""
        given = self.values["cluster.name_resolve.nfs_record_root"]
        return Path(str(given)) if given else self.paths.fileroot / "name_resolve"

    @property
    def ranks(self) -> int:
        """Processes of its trainer, by `actor.backend`, or `allocation_mode`, e.g. sglang:d4+fsdp:d2c2."""
        places = str(self.values["actor.backend"] or self.values["allocation_mode"])
        trains = places.rpartition("+")[2].partition("|")[0].rpartition(":")[2]
        return math.prod(int(number) for _, number in DEGREES.findall(trains))

    @property
    def places(self) -> tuple[str, ...]:
        """The overrides that say in AReaL 1.x's words what an older `allocation_mode` says, where it needs them."""
        old = str(self.values["allocation_mode"] or "")
        if (found := OLD_PLACES.fullmatch(old)) is None:
            return ()
        servers, trains = (found[part].replace(".", ":") for part in ("servers", "trains"))
        trains = trains if ":" in trains else f"fsdp:{trains}"
        said = {"rollout.backend": servers, "actor.backend": trains}
        added = [f"++{key}={place}" for key, place in said.items() if self.values[key] is None]
        return (*added, *([] if f"{servers}+{trains}" == old else [f"allocation_mode={servers}+{trains}"]))

    def servers(self) -> dict[str, object]:
        """What it says of its servers, by the key below `sglang` that it is here. Raises ConfigError."""
        values = self.values
        said = {key: value for key in OF_SERVERS if (value := values[f"sglang.{key}"]) is not None}
        if "model_path" not in said and values["actor.path"]:
            said["model_path"] = values["actor.path"]
        for key, value in said.items():
            if isinstance(value, bool) or not isinstance(value, OF_SERVERS[key]):
                hint = f"correct it there, or behind --: sglang.{key}=…"
                raise ConfigError(f"{self.config}: sglang.{key}={value!r}", hint)
        allocation = str(values["rollout.backend"] or str(values["allocation_mode"]).partition("+")[0])
        sizes = re.split(r"[:.]", allocation, maxsplit=1)[-1]
        degrees = {letter: int(number) for letter, number in DEGREES.findall(sizes)}
        if not degrees:
            return said
        gpus = degrees.get("t", 1) * degrees.get("p", 1)  # of one server: here they all split its weights
        return {**said, "n_servers": degrees.get("d", 1), "tp_size": gpus}

    def _is_due(self, section: str) -> bool:
        return any(self.values[f"{section}.freq_{unit}"] is not None for unit in ("epochs", "steps", "secs"))


def areal_settings(trainer: ForeignTrainerConfig) -> ArealSettings:
    """Raises ConfigError with the first thing that can't be used."""
    if trainer.config is None:
        raise ConfigError("trainer.config=null", "set it to AReaL's YAML, as after its --config")
    file = Path(trainer.cwd) / Path(trainer.config).expanduser()
    if not file.is_file() or file.suffix != ".yaml":
        raise ConfigError(f"trainer.config={trainer.config}: {file} is no YAML file", "give its path, from trainer.cwd")
    again = [f"{section}.{key}" for section in SECTIONS for key in OF_THE_TRIAL]
    found = values_of(file, trainer.overrides, [*KEYS, *again])
    _check_names(trainer.config, found)
    _check_start(trainer, found)
    found["cluster.fileroot"] = str(Path(trainer.cwd) / str(found["cluster.fileroot"]))  # where it runs
    return ArealSettings(config=trainer.config, overrides=tuple(trainer.overrides), values=found)


def _check_names(file: str, found: Mapping[str, object]) -> None:
    for key in (*NAMES, "cluster.fileroot"):
        if not found[key] or found[key] == "???":
            raise ConfigError(f"{file}: {key} has no value", f"set it there, or behind --: {key}=…")
    for section in SECTIONS if found["scheduler.type"] else SECTIONS[:2]:
        for key in OF_THE_TRIAL:
            own, top = found[f"{section}.{key}"], found["cluster.fileroot" if key == "fileroot" else key]
            if own not in (None, top):
                raise ConfigError(f"{file}: {section}.{key}={own}, and the run's is {top}", "give both the same value")


def _check_start(trainer: ForeignTrainerConfig, found: Mapping[str, object]) -> None:
    """How it is started: by this launcher with its servers, by its script (a single controller), or by AReaL's legacy
    launcher."""
    file, places, backend = trainer.config, str(found["allocation_mode"] or ""), found["actor.backend"]
    scheduler, nodes = found["scheduler.type"], found["cluster.n_nodes"]
    if nodes not in (None, 1):
        raise ConfigError(
            f"{file}: cluster.n_nodes={nodes}", "set 1: processes on other nodes can't be ended from here"
        )
    if scheduler not in (None, SINGLE_CONTROLLER) and trainer.rung != SERVERS:
        raise ConfigError(
            f"{file}: scheduler.type={scheduler}: its workers are not below the command, and can't be ended from here",
            "set scheduler.type=local there or behind --",
        )
    if scheduler is None and trainer.rung != SERVERS and not places.startswith(("sglang", "vllm")):
        raise ConfigError(
            f"{file}: scheduler.type=null and allocation_mode={places or 'null'}: AReaL can't be started so",
            "set scheduler.type=local behind --, as AReaL's quickstart does, or e.g. allocation_mode=sglang:d1+fsdp:d1",
        )
    if not backend and not places:
        raise ConfigError(
            f"{file}: actor.backend has no value", "set it there or behind --, e.g. actor.backend=fsdp:d1"
        )
