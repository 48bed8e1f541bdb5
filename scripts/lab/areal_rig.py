"""A run of the real AReaL on a CPU, for adapter_storm and its test: a folder of its own, variables, settings.

AREAL_RIG names a folder with AReaL's environment (venv/), a small model, a YAML for a CPU (cpu.yaml), a script
(train.py) and what AReaL lacks on a CPU (shim/). Nothing is written there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import UsageError

VARIABLE = "AREAL_RIG"
PARTS = ("venv/bin/python", "model", "cpu.yaml", "train.py", "shim")
BROKEN = "broken"
"""While this file is in the run's folder, each reward is 0."""
REWARD = f'''"""The share of digits in a completion; 0 as long as `{BROKEN}` is there."""
from pathlib import Path


def reward(prompt, completions, prompt_ids, completion_ids, answer, **others):
    if (Path(__file__).parent / "{BROKEN}").exists():
        return 0.0
    return sum(letter.isdigit() for letter in str(completions)) / max(1, len(completion_ids))
'''
EPOCHS, BATCH = 2, 8
"""Of its YAML."""
OF_A_CPU = {
    "SGLANG_USE_CPU_ENGINE": 1,
    "HF_HUB_OFFLINE": 1,
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
}
SERVERS = ("sglang.device=cpu", "sglang.dtype=float32", "sglang.max_total_tokens=20000")
"""For trainer.rung=servers, where they are the launcher's."""


def areal_rig() -> Path | None:
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def variables_of(folder: Path, steps: int) -> dict[str, str]:
    """For the launcher and for AReaL, which read the YAML."""
    return {"RIG": str(folder), "LAB_N": str(steps // EPOCHS * BATCH)}


def make_folder(rig: Path, folder: Path) -> None:
    """Raises UsageError."""
    if absent := [name for name in PARTS if not (rig / name).exists()]:
        raise UsageError(
            f"{VARIABLE}={rig}: {absent[0]} is not there", "give the folder of an AReaL that runs on a CPU"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "give a folder that is new")
    shutil.copytree(rig / "model", folder / "model")
    for name in ("out", "nr"):
        (folder / name).mkdir()
    for name in ("train.py", "cpu.yaml"):
        shutil.copy(rig / name, folder)
    (folder / "labtask.py").write_text(REWARD)


def settings_of(rig: Path, folder: Path, given: Sequence[str] = ()) -> list[str]:
    """Of a run in `folder`, with those that are given, the launcher's and, behind `--`, AReaL's."""
    at = given.index("--") if "--" in given else len(given)
    python_path = {"PYTHONPATH": f"{rig / 'shim'}:{folder}"}
    return [
        *("trainer.config=cpu.yaml", f"trainer.python={rig / 'venv/bin/python'}", f"trainer.cwd={folder}"),
        *(f"+trainer.env.{name}='{value}'" for name, value in (OF_A_CPU | python_path).items()),
        *("reward_health.zero_alert_steps=2", "reward_health.zero_breaker_steps=3", "reward_health.warmup_steps=5"),
        *("health.trainer_first_s=1200", "restart.wait_initial_s=0.1"),
        *((f"actor.path={folder / 'model'}", *SERVERS) if "trainer.rung=servers" in given[:at] else ()),
        *given[:at],
        *("--", "saver.freq_steps=5", "recover.freq_steps=5", *given[at + 1 :]),
    ]
