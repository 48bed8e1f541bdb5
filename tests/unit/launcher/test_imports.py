"""What the door and the policies may not bring along: no Ray, no torch, however they are imported."""

import os
import re
import subprocess
import sys

import pytest

from launcher.__main__ import main
from launcher.config.compose import REPOSITORY

LIGHT = (
    *(
        "launcher",
        "launcher.policy",
        "launcher.config.schema",
        "launcher.base.messages",
        "launcher.base.errors",
        "launcher.config.settings",
    ),
    *(
        "launcher.resources.config_checks",
        "launcher.resources.preflight",
        "launcher.resources.run_plan",
        "launcher.config.compose",
        "launcher.config.hydra_messages",
    ),
    *(
        "launcher.__main__",
        "launcher.checkpoints.checkpoint_store",
        "launcher.run_files.journal",
        "launcher.run_files.run_paths",
    ),
)
HEAVY = {"ray", "torch", "transformers", "sglang", "datasets", "wandb"}
IMPORT_ALL = """
import sys
before = set(sys.modules)
import importlib, pkgutil
for name in sys.argv[1].split(","):
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(module.__path__, name + ".") if name == "launcher.policy" else ():
        importlib.import_module(found.name)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
"""

WORDS = ("launcher.policy", "launcher.config.schema", "launcher.base.messages", "launcher.base.errors")


def brought_along(names: tuple[str, ...]) -> set[str]:
    """Top-level packages beside the standard library's that importing `names` loads, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(names)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.slow
def test_the_door_and_the_policies_are_light():
    loaded = brought_along(LIGHT)
    assert loaded & HEAVY == set()
    assert {"launcher", "hydra", "omegaconf"} <= loaded  # the probe sees what is there


@pytest.mark.slow
def test_policies_and_words_know_the_standard_library_alone():
    assert brought_along(WORDS) == {"launcher"}


def test_what_is_compiled_is_kept_for_the_processes_to_come(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "argv", ["launcher", "--version"])
    assert main() == 0
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert not sys.dont_write_bytecode


def test_no_test_file_imports_another():
    """What several of them use is in tests/support: a change of one file's tests must not break another file's."""
    tests = [*(REPOSITORY / "tests").rglob("test_*.py")]
    assert len(tests) > 300
    named = re.compile(r"^\s*from tests\.[\w.]*\btest_\w+ import|^\s*from tests\.[\w.]+ import test_", re.MULTILINE)
    assert named.search("from tests.unit.test_a import b")
    assert [str(path) for path in tests if named.search(path.read_text())] == []
