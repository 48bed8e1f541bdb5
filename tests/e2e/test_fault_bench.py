"""The smallest real cell of the fault benchmark: a run on the real SGLang into which nothing is injected."""

import json

import pytest

from scripts.lab.fault_bench.__main__ import main
from tests.support.machine import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_no_op_is_a_whole_run_without_an_alarm(tmp_path):
    minutes = str(scaled(10.0))
    assert main(["--cells", "noop", "--minutes", minutes, "--output", str(tmp_path / "made")]) == 0
    (cell,) = json.loads((tmp_path / "made" / "results.json").read_text())["cells"]
    assert (cell["status"], cell["measures"]["faults"], cell["measures"]["steps"]) == ("run", [4.0], [40.0])
    assert [said["is_met"] for said in cell["verdicts"]] == [True] * len(cell["verdicts"])
    assert cell["measures"]["alarms"] == [0.0]
    assert (tmp_path / "made" / "results.png").stat().st_size > 1000
