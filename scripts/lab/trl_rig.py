"""A run of TRL's GRPOTrainer with a small model on a CPU, for adapter_storm: a script, its options, settings.

TRL_PYTHON names the interpreter that has TRL; else this one is tried. The script is that of tests/e2e/test_trl.py,
which damages its weights where the file BROKEN is in the run's folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.config.compose import REPOSITORY

VARIABLE = "TRL_PYTHON"
SCRIPT = REPOSITORY / "tests" / "programs" / "trl_trainer.py"
BROKEN = "damage"
LOOKS_FOR = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
OPTIONS = (
    "--output_dir out --save_steps 10 --logging_steps 1 --per_device_train_batch_size 4 --num_generations 4 "
    "--max_completion_length 8 --use_cpu --bf16 false --report_to none --learning_rate 1e-5 "
    "--gradient_checkpointing false"
)


def needs_rig(settings: Sequence[str]) -> bool:
    """Whether nobody has named a script of their own."""
    return not any(word.startswith("trainer.command=") for word in settings)


def trl_python() -> str:
    """Raises UsageError."""
    python = os.environ.get(VARIABLE, sys.executable)
    if not SCRIPT.is_file():
        raise UsageError(f"{SCRIPT} is no file", "run this in a checkout, or give a script: -- trainer.command='…'")
    found = None if shutil.which(python) is None else subprocess.run([python, "-c", LOOKS_FOR], check=False, timeout=60)
    if found is None or found.returncode:
        raise UsageError(
            f"{VARIABLE}: {python} has no trl",
            f"set {VARIABLE} to the interpreter of an environment with trl, or give a script: -- trainer.command='…'",
        )
    return python


def settings_of(python: str, folder: Path, steps: int, given: Sequence[str] = ()) -> list[str]:
    """Of a run in `folder`, with those that are given."""
    return [
        f"trainer.command='python {SCRIPT} {OPTIONS} --max_steps {steps}'",
        *(f"trainer.python={python}", f"trainer.cwd={folder}", "trainer.checkpoints='out/checkpoint-*'"),
        *(f"cluster.fileroot={folder / 'runs'}", "reward_health.warmup_steps=10", "restart.wait_initial_s=0.1"),
        *given,
    ]
