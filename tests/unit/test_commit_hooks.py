"""The hooks of a commit find their programs in .venv, whatever the PATH of whoever commits."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launcher.config.compose import REPOSITORY

(LOCAL,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]


@pytest.mark.parametrize("hook", LOCAL["hooks"], ids=lambda hook: hook["id"])
def test_a_hook_runs_although_no_environment_is_active(hook, tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    command = [*shlex.split(hook["entry"]), "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
