"""Each command behind a figure of README.md and docs/measurements.md, at its smallest and on the real SGLang: it ends
with a point of that figure. One that nobody ran had stopped working unnoticed. What they measure here is worth nothing.
They share how a run is started, disturbed and read: one of them is run each time, the others in the tier `long`.

`python -m scripts.storm` is run by tests/e2e/test_storm.py.
"""

import json
import subprocess
import sys

import pytest

from launcher.config.compose import REPOSITORY
from tests.support.machine import scaled
from tests.support.worlds.benchmarks import SMALLEST

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


EACH_TIME = "disturb server_killed"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == EACH_TIME else pytest.mark.long) for name in SMALLEST]
)
def test_a_command_ends_with_its_figure(name, tmp_path):
    options, figures = SMALLEST[name]
    module, *what = name.split()
    made = ("--output", str(tmp_path)) if module == "fault_bench" else ("--json", str(tmp_path / "results.json"))
    command = [sys.executable, "-m", f"scripts.lab.{module}", *what, *options, *made]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=scaled(400), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    points = found["cells"][0]["measures"] if module == "fault_bench" else found["points"]
    assert [figure for figure in figures if not points.get(figure)] == [], points
