"""The settings of what a run shows of itself: WandB, TensorBoard, samples of completions, the page in a browser."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.settings import NATURAL, POSITIVE, Between, OneOf, part, setting


@dataclass
class WandbConfig:
    mode: str = setting("disabled", "where WandB's record is written", OneOf(("online", "offline", "disabled")))
    project: str | None = setting(None, "null: experiment_name")
    entity: str | None = setting(None, "WandB team or user; null: the login's")
    name: str | None = setting(None, "null: trial_name")
    group: str | None = setting(None, "null: none")
    tags: list[str] = setting([], "WandB tags")


@dataclass
class TensorBoardConfig:
    path: str | None = setting(
        None, "folder of TensorBoard's files, in one for each experiment and trial; null: none; needs tensorboardX"
    )


@dataclass
class StatsLoggerConfig:
    samples: int = setting(4, "completions of each step that samples.jsonl keeps; 0: none", NATURAL)
    samples_mib: float = setting(64.0, "samples.jsonl and the file before it together hold no more (MiB)", POSITIVE)
    wandb: WandbConfig = part(WandbConfig)
    tensorboard: TensorBoardConfig = part(TensorBoardConfig)


@dataclass
class WatchConfig:
    """A page in the browser, in a process beside the driver: docs/watch.md."""

    port: int | None = setting(None, "port of the driver's loopback that serves it; null: none", Between(1, 65535))
