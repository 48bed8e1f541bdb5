"""A stand-in for AReaL with its contract, in one file: its local launcher, and a script with its trainer.

As `areal/infra/launcher/local.py` (1.0.4) it starts a server and the script, whose output goes through `tee` into
trainer.log; it ends all of them once one has ended, and with exit code 1 in any case. As the script it takes steps,
prints AReaL's lines, writes a recover folder, and has a worker that holds the log's pipe and outlives it. What it
learns is a number that depends on every step.

As `areal/launcher/local.py` it is 0.3.4, by its source: AREAL_RECOVER_RUN tells the script whether to resume, each
minibatch has a table, and what is saved is a Hugging Face folder.
"""

import contextlib
import getpass
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import yaml

TABLE = "╒═╕\n│ ppo_actor/task_reward/avg │ {reward:.4e} │ ppo_actor/update/grad_norm │ 1.0e+00 │\n╘═╛\n"
OLD_TABLES = (
    "╒═╕\n│ grpo_actor/task_reward/avg │ {reward:.4e} │ grpo_actor/grad_norm │ 1.0e+00 │\n╘═╛\n"
    "Stats (2/2):\n╒═╕\n│ grpo_actor/grad_norm │ 1.0e+00 │\n╘═╛\n"
)
IS_RECOVERY = "AREAL_RECOVER_RUN"
FREQUENCY = dict.fromkeys(
    (
        *("frequence_seconds", "frequency_steps", "start_time", "steps", "last_time", "last_steps", "interval_steps"),
        *("interval_seconds", "initial_value"),
    ),
    0,
)


def folders(config: str) -> tuple[Path, Path]:
    """Of checkpoints and logs."""
    their = yaml.safe_load(Path(config).read_text())
    inner = Path(getpass.getuser()) / their["experiment_name"] / their["trial_name"]
    root = Path(their["cluster"]["fileroot"])
    return root / "checkpoints" / inner, root / "logs" / inner


def launch(arguments: list[str]) -> None:
    root, logs = folders(arguments[arguments.index("--config") + 1])
    logs.mkdir(parents=True, exist_ok=True)
    if Path(__file__).parent.parent.name == "areal":  # of before 1.0
        os.environ[IS_RECOVERY] = str(int((root / "recover_info" / "step_info.json").exists()))
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "server"])
    line = f"{sys.executable} -u {' '.join(arguments)} 2>&1 | tee -a {logs / 'trainer.log'}"
    trainer = subprocess.Popen(line, shell=True)
    while server.poll() is None and trainer.poll() is None:
        time.sleep(0.2)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the shell's own end with it
            process.terminate()
    sys.exit("JobException: a job has ended")


def train(arguments: list[str], steps: int = 40) -> None:
    root, _ = folders(arguments[arguments.index("--config") + 1])
    info, recover = root / "recover_info", root / "default" / "recover_checkpoint"
    state, told = {"step": 0, "weight": 1}, os.environ.get(IS_RECOVERY)
    if (info / "step_info.json").exists() if told is None else told == "1":
        state = json.loads((recover / ("__0_0.distcp" if told is None else "state.json")).read_text())
    if os.fork() == 0:  # it has the trainer's command line too
        time.sleep(3600)
    while state["step"] < steps:
        step = state["step"] = state["step"] + 1
        time.sleep(0.2)
        state["weight"] = (state["weight"] * 31 + step) % 1_000_003
        if step % 5 == 0:
            save(info, recover, state, is_old=told is not None)
        print(f"(AReaL) 20261122-10:00:00.000 StatsLogger INFO: Epoch 1/1 Step {step}/{steps}", end=" ")
        tables = "Stats (1/1):\n" + TABLE if told is None else "Stats (1/2):\n" + OLD_TABLES
        print(f"Train step {step}/{steps} done.\n" + tables.format(reward=0.2 + step / 100), flush=True)
    time.sleep(0.5)


def save(info: Path, recover: Path, state: dict, *, is_old: bool) -> None:
    """In AReaL's order: the checkpoint, then the step that it is of, then the others."""
    for folder in (info, recover):
        folder.mkdir(parents=True, exist_ok=True)
    if is_old:
        make_export(recover)
        (recover / "state.json").write_text(json.dumps(state))
        with zipfile.ZipFile(recover / "optim_world_size_1_rank_0.pt", "w") as file:
            file.writestr("optim/data.pkl", json.dumps(state))
    else:
        (recover / "__0_0.distcp").write_text(json.dumps(state))
        (recover / ".metadata").write_bytes(pickle.dumps({"dcp.optim.weight": "__0_0.distcp"}))
    step = {"epoch": 0, "epoch_step": state["step"] - 1, "global_step": state["step"] - 1, "steps_per_epoch": 1000}
    (info / "step_info.json").write_text(json.dumps(step))
    for name in ("saver_info", "evaluator_info", "checkpoint_info"):
        (info / f"{name}.json").write_text(json.dumps(dict.fromkeys(("epoch", "step", "time"), FREQUENCY)))
    (info / "stats_logger_info.json").write_text(json.dumps({"last_commit_step": state["step"] - 2}))
    (info / "dataloader_info.pkl").write_bytes(pickle.dumps([{}]))


def make_export(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")


if __name__ == "__main__":
    is_launcher = Path(__file__).name == "local.py"
    launch(sys.argv[1:]) if is_launcher else train(sys.argv[1:])
