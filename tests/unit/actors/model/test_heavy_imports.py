"""The trainer's imports: without garbage collection, and at a low priority. And who imports no torch at all."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors.model.heavy_imports import LowPriorityImport
from launcher.config.compose import REPOSITORY

LOWEST = 19
CAP_SYS_NICE = 23
WITHOUT_TORCH = """
import sys
import launcher.driver
import actors.training.trainer, actors.ranks.trainer_rank, actors.serving.sglang_server
print("imports", *{"torch", "transformers", "sglang", "pandas", "sympy"} & set(sys.modules))
"""
"""The driver imports the actors' classes, and each actor its own: what takes 8 s there delays each start by 8 s."""

TRAINER = """
import gc
from actors.model.heavy_imports import without_collection
with without_collection():
    assert not gc.isenabled()
    import actors.training.training
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
print("whole")
"""

FAILS = """
import gc
from actors.model.heavy_imports import without_collection
try:
    with without_collection():
        raise KeyError("not ours")
except KeyError:
    assert gc.isenabled()
print("whole")
"""

SLOW = """
import pathlib, time
while not pathlib.Path({end!r}).exists():
    time.sleep(0.01)
"""


def may_raise_priority() -> bool:
    """The kernel lets only a few processes, those with CAP_SYS_NICE."""
    lines = Path("/proc/self/status").read_text().splitlines()
    granted = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(granted >> CAP_SYS_NICE & 1)


def said(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_neither_the_driver_nor_an_actor_imports_torch_before_it_needs_it():
    assert said(WITHOUT_TORCH) == "imports"


@pytest.mark.slow
def test_nothing_is_collected_while_the_trainer_is_imported_and_its_objects_are_exempt_afterwards():
    assert said(TRAINER) == "whole"


def test_after_an_error_garbage_is_collected_again():
    assert said(FAILS) == "whole"


def test_an_import_at_low_priority_gets_the_usual_one_where_that_is_allowed(tmp_path, monkeypatch):
    end = tmp_path / "end"
    (tmp_path / "slow_to_import.py").write_text(SLOW.format(end=str(end)))
    monkeypatch.syspath_prepend(tmp_path)
    imports = LowPriorityImport("slow_to_import", LOWEST)
    waiting = threading.Thread(target=imports.run)
    waiting.start()
    while (lowest := niceness_of("imports")) != LOWEST:
        assert lowest is None or lowest == os.getpriority(os.PRIO_PROCESS, 0)
    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert imports.hurry() is may_raise_priority()
    assert niceness_of("imports") == (usual if may_raise_priority() else LOWEST)
    end.touch()
    waiting.join()
    assert imports.hurry(), "nothing is left of it"


def niceness_of(name):
    found = [thread.native_id for thread in threading.enumerate() if thread.name == name and thread.native_id]
    return os.getpriority(os.PRIO_PROCESS, found[0]) if found else None


def test_an_import_that_fails_is_told():
    with pytest.raises(ImportError):
        LowPriorityImport("there_is_no_such_module", LOWEST).run()
