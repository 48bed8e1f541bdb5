"""Policies decide from their arguments alone: what they may import, held by the files and by a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import launcher.policy
from tests.support.machine import scaled

FOLDER = Path(launcher.policy.__file__).parent
MODULES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
OURS = (
    "launcher.config.schema",
    "launcher.config.supervision",
    "launcher.base.messages",
    "launcher.base.disk_faults",
    "launcher.base.rollouts",
    "launcher.base.errors",
    "launcher.base.exit_codes",
    "launcher.base.wording",
    "launcher.policy.",
)
WORLDLY = {
    "time",
    "datetime",
    "random",
    "secrets",
    "os",
    "pathlib",
    "io",
    "socket",
    "subprocess",
    "threading",
    "asyncio",
}


def imported_by(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_policy_imports_the_standard_library_and_the_vocabulary_only(path):
    for name in imported_by(path):
        top = name.partition(".")[0]
        assert name.startswith(OURS) if top == "launcher" else top in sys.stdlib_module_names, name
        assert top not in WORLDLY, f"{path.name} imports {name}: a decision has no clock, chance or files"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_policy_calls_neither_open_nor_print(path):
    calls = [node.func.id for node in ast.walk(ast.parse(path.read_text())) if is_plain_call(node)]
    assert not {"open", "print", "input", "exec", "eval"} & set(calls)


def is_plain_call(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_importing_all_policies_brings_no_ray_torch_or_numpy():
    names = [f"launcher.policy.{path.stem}" for path in MODULES]
    code = (
        f"import {', '.join(names)}, sys; print(*({{'ray', 'torch', 'numpy', 'sglang', 'aiohttp'}} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=scaled(60)
    )
    assert result.stdout.strip() == ""
    assert len(names) > 10
