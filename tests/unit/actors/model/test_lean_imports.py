"""The trainer's imports: what is hidden while they last, and nothing after. And who imports no torch at all."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors.model.lean_imports import LowPriorityImport
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
import gc, importlib.util, sys
from actors.model.lean_imports import NEEDLESS, lean_imports
with lean_imports():
    assert not gc.isenabled()
    assert not any(importlib.util.find_spec(name) for name in NEEDLESS)
    import actors.training.training
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained("assets/arithmetic/model")
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
assert "sklearn" not in sys.modules and "pandas" not in sys.modules
import scipy, sklearn
print("whole")
"""

ALREADY = """
import sys, types
known = sys.modules["scipy"] = types.ModuleType("scipy")
from actors.model.lean_imports import lean_imports
try:
    with lean_imports():
        assert sys.modules["scipy"] is known
        raise KeyError("not ours")
except KeyError:
    import gc
    assert gc.isenabled() and sys.modules["scipy"] is known
print("whole")
"""

NEEDED = """
from actors.model.lean_imports import lean_imports
with lean_imports():
    from torch import nn
    from actors.model.optimizer import build_optimizer
    from launcher.config.optimizer import OptimizerConfig
    made = build_optimizer(nn.Linear(1, 1), OptimizerConfig(type="torchao.optim:AdamW8bit"))
import torchao.optim
assert isinstance(made, torchao.optim.AdamW8bit)
print("whole")
"""

ADAPTERS = """
from actors.model.lean_imports import lean_imports
with lean_imports():
    from transformers import AutoModelForCausalLM
    from actors.model.lora import add_adapters
    from launcher.config.schema import ActorConfig
    model = AutoModelForCausalLM.from_pretrained("assets/arithmetic/model")
    add_adapters(model, ActorConfig(path="", use_lora=True, lora_rank=2))
assert any(parameter.requires_grad for parameter in model.parameters())
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
def test_the_trainer_is_imported_without_what_it_does_not_need_and_all_is_there_afterwards():
    assert said(TRAINER) == "whole"


@pytest.mark.slow
def test_what_was_imported_before_stays_and_an_error_passes():
    assert said(ALREADY) == "whole"


@pytest.mark.slow
def test_an_optimizer_of_a_hidden_package_can_be_made_and_the_package_stays():
    pytest.importorskip("torchao")
    assert said(NEEDED) == "whole"


@pytest.mark.slow
def test_adapters_can_be_added():
    """PEFT imports what is hidden, accelerate: each run with actor.use_lora=true ended at its start."""
    pytest.importorskip("peft")
    assert said(ADAPTERS).endswith("whole")


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
