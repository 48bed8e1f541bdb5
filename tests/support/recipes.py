"""Where the recipes for Prometheus and Grafana lie, and the questions of the dashboard."""

import json

from launcher.config.compose import REPOSITORY

PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "grpo.json"


def dashboard_queries(run: str = ".*") -> list[str]:
    """Of every panel, for runs that the pattern `run` names."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"].replace("$run", run) for panel in panels for target in panel["targets"]]
