"""Where the injector writes: a folder beside logs and checkpoints that the run never reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launcher.run_files.run_paths import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPaths:
    """`{fileroot}/faults/{user}/{experiment}/{trial}/`; nothing is created.

    `record`: what was done, and when. `proxy`: what the interposer is to spoil, read by it several times a second;
    `proxy_fired`: how much of it it has spoiled; `proxy_lock`: held by a living interposer.
    """

    root: Path
    record: Path
    proxy: Path
    proxy_fired: Path
    proxy_lock: Path
    damaged_weights: Path

    @classmethod
    def of(cls, paths: RunPaths) -> Self:
        root = paths.fileroot / "faults" / paths.user / paths.experiment_name / paths.trial_name
        return cls(
            root=root,
            record=root / "faults.jsonl",
            proxy=root / "proxy.json",
            proxy_fired=root / "proxy_fired.json",
            proxy_lock=root / ".interposer.lock",
            damaged_weights=root / "damaged_weights",
        )
