"""Exports a run's figures through Ray's own metrics, which Prometheus reads (deploy/prometheus), with its server list.

Ray's agent of the driver's node has them about ten seconds later. On a cluster that the run starts, they are exported
where `cluster.metrics_port` says under which port; on a joined one, always, under the port that it was started with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import ray
from ray.util.metrics import Gauge

from launcher.base.durable import replace_file
from launcher.base.messages import ServerInfo
from launcher.config.schema import RunConfig
from launcher.reporting.run_gauges import GAUGES, Reading
from launcher.run_files.run_paths import RunPaths


class RayMetrics:
    """Nothing here waits, and nothing that fails here ends the run."""

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        self._is_on = config.cluster.address != "local" or config.cluster.metrics_port is not None
        self._paths = paths
        self._run = f"{paths.user}/{paths.experiment_name}/{paths.trial_name}"
        self._gauges: dict[str, Gauge] = {}
        self._targets: tuple[tuple[str, str], ...] | None = None

    def export(self, readings: Iterable[Reading]) -> None:
        """From any thread of a driver that is connected to Ray."""
        if not self._is_on or not ray.is_initialized():
            return
        for reading in readings:
            gauge = self._gauges.get(reading.name)
            if gauge is None:
                keys = ("run", *reading.labels)
                gauge = self._gauges[reading.name] = Gauge(reading.name, GAUGES[reading.name], tag_keys=keys)
            gauge.set(float(reading.value), tags={"run": self._run, **reading.labels})

    def list_servers(self, servers: Sequence[ServerInfo]) -> None:
        """Keep `scrape_targets.json`, Prometheus's file_sd format, with the addresses of the servers as they change."""
        found = tuple((server.name, address) for server in servers if (address := urlsplit(server.url).netloc))
        if not self._is_on or found == self._targets:
            return
        targets = [{"targets": [at], "labels": {"run": self._run, "server": name}} for name, at in found]
        try:
            replace_file(self._paths.scrape_targets, json.dumps(targets).encode(), durable=False)
        except OSError:  # tried again at the next call
            return
        self._targets = found
