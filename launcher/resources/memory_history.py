"""Keeps for the next attempt which settings had to be lowered on this host because memory ran out.

One file for each host, device, model and set of memory settings as they were fitted or written: whoever changes one of
these starts from scratch. To forget, delete the file, or set memory.remember=false.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from launcher.base.durable import make_folder, replace_file
from launcher.base.errors import StorageError
from launcher.base.messages import Overrides
from launcher.config.schema import RunConfig
from launcher.config.settings import value_of
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import KINDS, MemorySettings, TriedSettings
from launcher.resources.hardware import Hardware

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedSettings:
    """`overrides`: settings that were lowered. `tried`: under which ones memory ran out, and where."""

    overrides: Overrides
    tried: tuple[TriedSettings, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHistory:
    """The file of one host and configuration; `about` is what it is for, and written into it for people."""

    path: Path
    about: Mapping[str, object]

    @classmethod
    def of(cls, config: RunConfig, fileroot: Path, hardware: Hardware) -> Self:
        host = socket.gethostname()
        about: dict[str, object] = {
            "host": host,
            "device": device(hardware),
            "model": config.actor.path,
            "settings": {key: value_of(config, key) for key in SETTINGS},
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        return cls(path=fileroot / "memory" / f"{host}-{digest}.json", about=about)

    def read(self) -> RememberedSettings | None:
        """None where there is nothing. Raises StorageError where it is damaged or can't be read."""
        try:
            return _parse(json.loads(self.path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{self.path} can't be used: {error!r}", "it is ignored, and replaced when memory runs out"
            ) from error

    def keep(self, remembered: RememberedSettings, *, by: str) -> None:
        """`by`: the run that learnt it. Raises StorageError."""
        tried = [{"ran_out": one.ran_out, "settings": asdict(one.settings)} for one in remembered.tried]
        content = {"format": FORMAT, **self.about, "by": by, "overrides": dict(remembered.overrides), "tried": tried}
        try:
            make_folder(self.path.parent)
            replace_file(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            raise StorageError(
                f"{self.path} can't be written: {error.strerror or error}",
                "the next attempt will learn it again; make room on the disk of cluster.fileroot",
            ) from error


def device(hardware: Hardware) -> str:
    """Name and memory of what the run works on. Rounded: a container's limit differs by pages from start to start."""
    if hardware.gpus:
        return ", ".join(f"{gpu.name} {gpu.memory / 2**30:.0f} GiB" for gpu in hardware.gpus)
    return f"cpu {hardware.memory / 2**30:.0f} GiB"


SETTINGS = (
    *("sglang.n_servers", "sglang.tp_size", "sglang.dp_size", "sglang.dtype", "sglang.device", "sglang.context_length"),
    *("sglang.mem_fraction_static", "sglang.max_total_tokens", "sglang.memory_limit_gib"),
    *("sglang.max_running_requests", "rollout.max_concurrent_rollouts", "gconfig.n_samples", "gconfig.max_new_tokens"),
    *("actor.device", "actor.dp_size", "actor.dtype", "actor.mb_spec.max_tokens_per_mb"),
    *("actor.gradient_checkpointing", "actor.kl_ctl", "actor.kl_loss_coef", "actor.entropy_coeff"),
    *("actor.ppo_n_minibatches", "actor.use_lora", "actor.lora_rank", "train_dataset.max_length"),
)
"""What memory depends on, as it was fitted or written."""


def _parse(content: Mapping[str, object]) -> RememberedSettings:
    """Raises ValueError, KeyError, TypeError."""
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r} is not {FORMAT}")
    overrides, tried = content["overrides"], content["tried"]
    if not isinstance(overrides, Mapping) or not isinstance(tried, Sequence):
        raise TypeError("overrides or tried is missing")
    return RememberedSettings(
        overrides={str(key): checked(str(key), value) for key, value in overrides.items()},
        tried=tuple(
            TriedSettings(ran_out=RanOut(one["ran_out"]), settings=MemorySettings(**one["settings"])) for one in tried
        ),
    )


def checked(key: str, value: object) -> float | int | bool:
    """A value that the ladder could have given `key`: of its kind, and more than nothing. Raises ValueError."""
    kind = KINDS[key]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and type(value) is int and value > 0:
        return value
    if kind is float and isinstance(value, float) and 0 < value <= 1:
        return value
    raise ValueError(f"{key}={value!r} is no setting of the ladder")
