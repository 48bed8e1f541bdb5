"""examples/arithmetic_cpu.ipynb: its cells, in their order, on the real SGLang."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from launcher.config.compose import REPOSITORY
from tests.support.machine import scaled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NOTEBOOK = json.loads((REPOSITORY / "examples" / "arithmetic_cpu.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.quick
def test_the_notebook_is_whole_and_holds_no_output():
    assert (NOTEBOOK["nbformat"], len(CELLS)) == (4, 7)
    for number, cell in enumerate(CELLS):
        compile(cell, f"cell {number}", "exec")
    assert [cell["outputs"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"] == [[]] * len(CELLS)


@pytest.mark.long  # the same command and a killed trainer: tests/e2e/test_one_run.py
def test_its_cells_run_in_order_and_the_killed_trainer_costs_no_step(tmp_path, request):
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join(CELLS))
    cells = subprocess.Popen(
        [sys.executable, "-u", str(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        shown, _ = cells.communicate(timeout=scaled(600))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(cells.pid, signal.SIGKILL)  # the run that a failed cell has left; its processes end with it
    if made := re.search(r"its files are in (\S+)$", shown, re.MULTILINE):
        request.addfinalizer(lambda: shutil.rmtree(made[1], ignore_errors=True))
    assert cells.returncode == 0, shown
    assert "FINISHED" in shown
    assert "incident.began | trainer_crash" in shown
    assert "incident.ended | trainer_crash" in shown
    steps = int(re.search(r"^STEPS = (\d+)$", CELLS[0], re.MULTILINE)[1])
    assert [int(step) for step in re.findall(r"^ *(\d+) +\d\.\d\d  █*$", shown, re.MULTILINE)] == list(range(steps))
    assert shown.rstrip().endswith("exit code 0")
