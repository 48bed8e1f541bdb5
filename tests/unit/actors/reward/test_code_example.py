"""The example of a reward that runs code: what the code can't reach where bubblewrap is installed."""

import importlib
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[4] / "assets" / "examples"
IS_KEPT_OUT = {
    "reads": f"not os.path.exists({str(EXAMPLES)!r})",
    "writes": "not os.access('/usr', os.W_OK)",
    "network": "[name for _, name in socket.if_nameindex()] == ['lo']",
    "processes": "sum(name.isdigit() for name in os.listdir('/proc')) < 4",
    "environment": "'PATH' not in os.environ",
}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("code_reward")


def program(tmp_path, monkeypatch, text):
    """A `bwrap` of the test's own, the first on PATH."""
    file = tmp_path / "bwrap"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize("what", IS_KEPT_OUT)
def test_with_bubblewrap_code_is_kept_out(example, what):
    code = f"```python\nimport os, socket\nkept_out = {IS_KEPT_OUT[what]}\n```"
    assert example.passes_tests(code, "assert kept_out") == 1.0


def test_a_bubblewrap_that_does_not_work_is_told_in_place_of_wrong_rewards(example, tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "echo 'No permissions to create a new namespace' >&2; exit 1")
    with pytest.raises(RuntimeError, match="bubblewrap does not work here: No permissions"):
        example._sandbox()


def test_without_bubblewrap_the_log_says_what_code_may_do(example, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert example._sandbox() == []
    assert "may read this user's files, and has the network" in caplog.text
