"""Where the injector writes: a folder beside logs and checkpoints that the run never reads."""

from __future__ import annotations

from launcher.run_files.run_paths import RunPaths


class FaultPaths:
    """`{fileroot}/faults/{user}/{experiment}/{trial}/`; nothing is created.

    `record`: what was done, and when.
    """

    def __init__(self, paths: RunPaths) -> None:
        root = self.root = paths.fileroot / "faults" / paths.user / paths.experiment_name / paths.trial_name
        self.record = root / "faults.jsonl"
