"""A stand-in for AReaL 1.0.4 with its contract, in one file: its legacy launcher, and a script with its trainer.

As `areal/infra/launcher/local.py` it starts a server and the script, whose output goes through `tee` into trainer.log;
it ends all of them once one has ended, and with exit code 1 in any case. As the script it takes steps, prints AReaL's
lines, writes a recover folder, and has a worker that holds the log's pipe and outlives it. What it learns is a number
that depends on every step.

With AREAL_SPMD_MODE=0 the script is a single controller, as one was seen: it starts two ranks and a worker of rollouts,
which starts the server; steps are in main.log. It ends with exit code 1 after the loss of a rank. After that of a
server it says that training has failed, and stays; so do its ranks where it is killed.
"""

import contextlib
import getpass
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import psutil
import yaml

TABLE = "╒═╕\n│ ppo_actor/task_reward/avg │ {reward:.4e} │ ppo_actor/update/grad_norm │ 1.0e+00 │\n╘═╛\n"
WORKER, SERVER = "areal.infra.rpc.rpc_server", "areal.engine.launch_server"
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
    _, logs = folders(arguments[arguments.index("--config") + 1])
    logs.mkdir(parents=True, exist_ok=True)
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
    root, logs = folders(arguments[arguments.index("--config") + 1])
    info, recover = root / "recover_info", root / "default" / "recover_checkpoint"
    state = {"step": 0, "weight": 1}
    if (info / "step_info.json").exists():
        state = json.loads((recover / "__0_0.distcp").read_text())
    is_single = os.environ.get("AREAL_SPMD_MODE") == "0"
    workers = [worker("actor", 0), worker("actor", 1), worker("rollout", 0)] if is_single else []
    logs.mkdir(parents=True, exist_ok=True)
    said = (logs / "main.log").open("a") if is_single else sys.stdout
    if not is_single and os.fork() == 0:  # it has the trainer's command line too
        time.sleep(3600)
    while state["step"] < steps:
        step = state["step"] = state["step"] + 1
        time.sleep(0.2)
        check(workers, said)
        state["weight"] = (state["weight"] * 31 + step) % 1_000_003
        if step % 5 == 0:
            save(info, recover, state)
        print(f"(AReaL) 20261122-10:00:00.000 StatsLogger INFO: Epoch 1/1 Step {step}/{steps}", end=" ", file=said)
        table = "Stats (1/1):\n" + TABLE.format(reward=0.2 + step / 100)
        print(f"Train step {step}/{steps} done.\n" + table, flush=True, file=said)
    *ranks, rollouts = workers or [None]
    for one in ranks:
        one.terminate()
        one.wait()
        time.sleep(1.0)
    if rollouts is not None:
        (root / "closed").touch()
        rollouts.terminate()
    time.sleep(0.5)


def worker(role: str, index: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", WORKER, "--role", role, "--worker-index", str(index)])


def check(workers: list[subprocess.Popen], said: TextIO) -> None:
    """As its calls of their engines do."""
    *ranks, rollouts = workers or [None]
    if any(rank.poll() is not None for rank in ranks):
        sys.exit("WorkerFailedError: a worker has ended")
    if rollouts is not None and rollouts.poll() is not None:
        print("(AReaL) 20261122-10:00:00.000 RLTrainer ERROR: Training failed with exception", flush=True, file=said)
        time.sleep(3600)


def serve_rollouts() -> None:
    subprocess.run([sys.executable, "-m", SERVER], check=False)
    sys.exit(1)


def save(info: Path, recover: Path, state: dict) -> None:
    """In AReaL's order: the checkpoint, then the step that it is of, then the others."""
    for folder in (info, recover):
        folder.mkdir(parents=True, exist_ok=True)
    (recover / "__0_0.distcp").write_text(json.dumps(state))
    (recover / ".metadata").write_bytes(pickle.dumps({"dcp.optim.weight": "__0_0.distcp"}))
    step = {"epoch": 0, "epoch_step": state["step"] - 1, "global_step": state["step"] - 1, "steps_per_epoch": 1000}
    (info / "step_info.json").write_text(json.dumps(step))
    for name in ("saver_info", "evaluator_info", "checkpoint_info"):
        (info / f"{name}.json").write_text(json.dumps(dict.fromkeys(("epoch", "step", "time"), FREQUENCY)))
    (info / "stats_logger_info.json").write_text(json.dumps({"last_commit_step": state["step"] - 2}))
    (info / "dataloader_info.pkl").write_bytes(pickle.dumps([{}]))


if __name__ == "__main__":
    match Path(__file__).stem, sys.argv[1:]:
        case "local", arguments:
            launch(arguments)
        case "rpc_server", ["--role", "rollout", *_]:
            serve_rollouts()
        case (("rpc_server" | "launch_server"), _):
            time.sleep(3600)
        case _, arguments:
            train(arguments)
