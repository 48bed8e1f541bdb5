"""deploy/prometheus and deploy/grafana ask for figures that exist; the rules come when they should, and only then."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from actors.serving.sglang_cpu import sglang_folder
from launcher.config.compose import REPOSITORY
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of
from launcher.reporting.run_gauges import GAUGES
from tests.support.recipes import DASHBOARD, PROMETHEUS, dashboard_queries

EXPRESSIONS = [rule["expr"] for rule in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"][0]["rules"]]
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on the PATH")


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *dashboard_queries()])
def test_a_query_names_figures_that_are_exported(expression):
    ours = set(re.findall(r"ray_(grpo_\w+)", expression))
    theirs = {f"sglang:{name}" for name in re.findall(r"sglang\[:_\](\w+)", expression)}
    assert ours or theirs
    assert ours <= set(GAUGES)
    source = "".join(path.read_text() for path in sglang_folder().rglob("*metrics*.py"))
    assert all(f'"{name}"' in source for name in theirs)


def test_every_figure_is_on_the_page_of_metrics():
    page = (REPOSITORY / "docs" / "watch.md").read_text()
    assert set(re.findall(r"^\| `ray_(grpo_\w+)`", page, re.MULTILINE)) == set(GAUGES)


def test_the_dashboard_has_no_panel_above_another():
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_scrape_configuration_names_what_the_launcher_has():
    text = (PROMETHEUS / "prometheus.yml").read_text()
    assert set(re.findall(r"`(cluster\.\w+)=", text)) <= {one.key for one in settings_of(RunConfig)}
    config = yaml.safe_load(text)
    assert [job["job_name"] for job in config["scrape_configs"]] == ["grpo", "sglang"]


@needs_promtool
@pytest.mark.parametrize("words", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_accepts_the_rules_and_their_tests(words):
    done = subprocess.run(["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_rule_that_never_comes_fails_its_test(tmp_path):
    for name in ("rules.yml", "rules_test.yml"):
        shutil.copy(PROMETHEUS / name, tmp_path)
    rules = tmp_path / "rules.yml"
    rules.write_text(rules.read_text().replace("max_over_time(ray_grpo_reward[15m]) == 0", "ray_grpo_reward < 0"))
    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "GrpoRewardZero" in done.stdout + done.stderr
