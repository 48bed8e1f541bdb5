"""The trainer's imports: what is hidden while they last, and nothing after. And who imports no torch at all."""

import subprocess
import sys

import pytest

from launcher.config.compose import REPOSITORY

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
