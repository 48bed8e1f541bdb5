"""A whole run with `cluster.metrics_port`, read by the real Prometheus with the recipe of deploy/: what it was told.

Without Prometheus on the PATH (Debian's package `prometheus`) this is skipped.
"""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from launcher.base.addresses import free_port
from launcher.reporting.current_status import read_now
from launcher.reporting.run_gauges import GAUGES
from tests.programs.supervised_run import SupervisedRun
from tests.support.recipes import PROMETHEUS, dashboard_queries

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus on the PATH"),
]


class Prometheus:
    """The real one, with deploy/'s configuration for the run at `paths`, scraping every second."""

    def __init__(self, folder: Path, paths, metrics_port):
        self._at = f"127.0.0.1:{free_port()}"
        names = f"{paths.user}/{paths.experiment_name}/{paths.trial_name}"
        text = (PROMETHEUS / "prometheus.yml").read_text().replace("15s", "1s").replace("9400", str(metrics_port))
        text = text.replace("USER/EXPERIMENT/TRIAL", names).replace("outputs/grpo", str(paths.fileroot))
        (folder / "prometheus.yml").write_text(text)
        shutil.copy(PROMETHEUS / "rules.yml", folder)
        self._process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={self._at}"),
                f"--storage.tsdb.path={folder / 'data'}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "prometheus.log").open("wb"),
        )

    def ask(self, what, **words):
        """None while it starts."""
        try:
            with urllib.request.urlopen(f"http://{self._at}/api/v1/{what}?{urllib.parse.urlencode(words)}") as said:
                return json.load(said)["data"]
        except (ConnectionError, urllib.error.URLError):
            return None

    def value(self, expression):
        """Of the only series there is; None without one."""
        found = self.ask("query", query=expression)
        return float(found["result"][0]["value"][1]) if found and len(found["result"]) == 1 else None

    def close(self):
        self._process.terminate()
        self._process.wait()


def test_the_real_prometheus_reads_a_run_its_servers_and_its_alerts(tmp_path):
    port = free_port()
    (tmp_path / "prometheus").mkdir()
    with SupervisedRun(tmp_path, steps=3000, servers=1, settings=[f"cluster.metrics_port={port}"]) as run:
        prometheus = Prometheus(tmp_path / "prometheus", run.paths, port)
        try:
            run.wait_until(lambda: (prometheus.value("ray_grpo_last_step") or 0) >= 1, "a committed step is told")
            run.wait_until(lambda: prometheus.value('ray_grpo_servers{state="READY"}') == 1, "its server is ready")
            assert prometheus.value('ray_grpo_run_state{state="RUNNING"}') == 1
            assert prometheus.value("ray_grpo_total_steps") == read_now(run.paths).status.total_steps
            (series,) = prometheus.ask("query", query="ray_grpo_total_steps")["result"]
            names = f"{run.paths.user}/{run.paths.experiment_name}/{run.paths.trial_name}"
            assert series["metric"] == {
                "__name__": "ray_grpo_total_steps",
                "run": names,
                "instance": f"127.0.0.1:{port}",
                "job": "grpo",
            }
            told = prometheus.ask("label/__name__/values")
            assert {name.removeprefix("ray_") for name in told if name.startswith("ray_")} <= set(GAUGES)
            run.wait_until(
                lambda: prometheus.value('up{job="sglang"}') == 1, "its server let Prometheus in with the key"
            )
            for query in dashboard_queries(names):
                assert prometheus.ask("query", query=query) is not None, query
            rules = prometheus.ask("rules")["groups"][0]["rules"]
            assert len(rules) == 10
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        finally:
            prometheus.close()
