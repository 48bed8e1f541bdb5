"""The name by which a shell of this user reaches the interpreter that runs: for commands that are shown to be typed."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def python() -> str:
    """`python` where that is this one, else its path. Links are not followed: they tell a virtual environment apart."""
    found = shutil.which("python")
    is_own = found is not None and Path(found).parent == Path(sys.executable).parent
    return "python" if is_own else shlex.quote(sys.executable)
