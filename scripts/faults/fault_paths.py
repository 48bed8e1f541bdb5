"""Where the injector writes: a folder beside logs and checkpoints that the run never reads."""

from __future__ import annotations

from launcher.run_files.run_paths import RunPaths


class FaultPaths:
    """`{fileroot}/faults/{user}/{experiment}/{trial}/`; nothing is created.

    `record`: what was done, and when. `proxy`: what the interposer is to spoil, read by it several times a second;
    `proxy_fired`: how much of it it has spoiled; `proxy_lock`: held by a living interposer.
    """

    def __init__(self, paths: RunPaths) -> None:
        root = self.root = paths.fileroot / "faults" / paths.user / paths.experiment_name / paths.trial_name
        self.record = root / "faults.jsonl"
        self.proxy, self.proxy_fired = root / "proxy.json", root / "proxy_fired.json"
        self.proxy_lock = root / ".interposer.lock"
        self.damaged_weights = root / "damaged_weights"
