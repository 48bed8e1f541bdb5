"""Where the injector writes: a folder of its own, beside logs and checkpoints, that the run never looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.run_files.run_paths import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlace:
    """`{fileroot}/faults/{user}/{experiment}/{trial}/`. Asking for a path creates nothing."""

    root: Path

    @classmethod
    def of(cls, paths: RunPaths) -> FaultPlace:
        return cls(root=paths.fileroot / "faults" / paths.user / paths.experiment_name / paths.trial_name)

    @property
    def record(self) -> Path:
        """What was done, and when."""
        return self.root / "faults.jsonl"

    @property
    def proxy(self) -> Path:
        """What the interposer is to spoil; read by it several times a second."""
        return self.root / "proxy.json"

    @property
    def proxy_fired(self) -> Path:
        """How much of it it has spoiled."""
        return self.root / "proxy_fired.json"

    @property
    def proxy_lock(self) -> Path:
        """Held by a living interposer."""
        return self.root / ".interposer.lock"

    @property
    def damaged_weights(self) -> Path:
        return self.root / "damaged_weights"
