"""Each command behind a figure of README.md and docs/measurements.md, at its smallest and on the real SGLang: it ends
with a point of that figure. One that nobody ran had stopped working unnoticed. What they measure here is worth nothing.

`python -m scripts.storm` is run by tests/e2e/test_storm.py.
"""

import json
import subprocess
import sys

import pytest

from launcher.config.compose import REPOSITORY
from tests.support.machine import scaled
from tests.support.worlds.benchmarks import BY_FAULT_BENCH, SMALLEST

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def end_of(module, *words):
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=scaled(300), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_ends_with_its_figure(name, tmp_path):
    options, figures = SMALLEST[name]
    end_of("scripts.lab.benchmark", name, *options, "--json", str(tmp_path / "found.json"))
    points = json.loads((tmp_path / "found.json").read_text())["points"]
    assert [figure for figure in figures if not points.get(figure)] == [], points


def test_the_benchmark_of_faults_writes_what_its_page_shows(tmp_path):
    end_of("scripts.lab.fault_bench", "--cells", BY_FAULT_BENCH, "--output", str(tmp_path / "made"))
    (cell,) = json.loads((tmp_path / "made" / "results.json").read_text())["cells"]
    assert (cell["name"], cell["status"]) == (BY_FAULT_BENCH, "run")
    assert cell["measures"]["ends_contaminated"]
    assert BY_FAULT_BENCH in (tmp_path / "made" / "results.md").read_text()
