"""The settings of what a run shows of itself: WandB, TensorBoard, OpenTelemetry, samples, the page, costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.config.settings import NATURAL, POSITIVE, between, part, setting


@dataclass
class WandbConfig:
    mode: Literal["online", "offline", "disabled"] = setting(
        "disabled",
        "where WandB's record is written; offline: to the run's logs; disabled: nowhere",
    )
    project: str | None = setting(None, "WandB project; null: experiment_name")
    entity: str | None = setting(None, "WandB team or user; null: that of the login")
    name: str | None = setting(None, "name of the run in WandB; null: trial_name")
    group: str | None = setting(None, "WandB group; null: none")
    tags: list[str] = setting([], "WandB tags")


@dataclass
class TensorBoardConfig:
    path: str | None = setting(
        None,
        "folder for TensorBoard's files, with one folder for each experiment and trial; needs tensorboardX; null: none",
    )


@dataclass
class OtelConfig:
    exporter: Literal["none", "otlp"] = setting(
        "none",
        "where the run's trace is sent; otlp: over HTTP to the collector of OTEL_EXPORTER_OTLP_ENDPOINT; none: nowhere",
    )


@dataclass
class StatsLoggerConfig:
    samples: int = setting(
        4, "number of completions of each step that are kept in samples.jsonl, one prompt's first; 0: none", NATURAL
    )
    samples_mib: float = setting(64.0, "upper limit of samples.jsonl and the file before it together, in MiB", POSITIVE)
    wandb: WandbConfig = part(WandbConfig)
    tensorboard: TensorBoardConfig = part(TensorBoardConfig)
    otel: OtelConfig = part(OtelConfig)


@dataclass
class PriceConfig:
    price_per_hour: float | None = setting(
        None,
        "price of all machines of the run for an hour, in any currency; summary and report then show what faults "
        "cost; null: not shown",
        NATURAL,
    )


@dataclass
class WatchConfig:
    """A page in the browser, in a process beside the driver: docs/watch.md."""

    port: int | None = setting(
        None, "port on the driver's loopback interface that serves the live page; null: no page", between(1, 65535)
    )
