"""A small trainer of nobody's project: steps, JSONL metrics or printed lines, checkpoints, `--resume`, and faults.

What it learns is a number that depends on every step, so that a step left out or taken twice shows in the end. Faults
are files in its working folder, each taken once: `break-<step>` damages the weights at that step, so that rewards are
0 until an earlier checkpoint is loaded; `environment` makes rewards 0 as long as it is there; `nan-<step>` makes two
steps' figures NaN; `exit-<step>` ends it with exit code 1. Before that step it waits while `hold-<step>` is there.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path


def take(fault: Path) -> bool:
    found = fault.exists()
    fault.unlink(missing_ok=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--sound-step-s", type=float, help="of a step whose rewards are not 0")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--metrics", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--child", action="store_true", help="has a child that does not end by itself")
    given = parser.parse_args()
    state = {"step": 0, "weight": 1, "is_broken": False}
    if given.resume:
        state = json.loads((given.resume / "state.json").read_text())
    if given.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    while state["step"] < given.steps:
        step = state["step"] = state["step"] + 1
        while Path(f"hold-{step}").exists():
            time.sleep(0.01)
        is_sound = not (state["is_broken"] or Path("environment").exists())
        step_s = given.step_s if given.sound_step_s is None or not is_sound else given.sound_step_s
        time.sleep(step_s)
        state["weight"] = (state["weight"] * 31 + step) % 1_000_003
        state["is_broken"] = state["is_broken"] or take(Path(f"break-{step}"))
        if take(Path(f"exit-{step}")):
            sys.exit("RuntimeError: as the test asked for")
        if take(Path(f"nan-{step}")):
            state["nan_until"] = step + 1
        noise = random.Random(step).uniform(-0.05, 0.05)
        reward = 0.0 if state["is_broken"] or Path("environment").exists() else min(0.9, 0.2 + 0.01 * step) + noise
        loss = math.nan if state.get("nan_until", 0) >= step else 0.1
        report = {"step": step, "reward": reward, "loss": loss, "time": time.time()}
        if given.metrics:
            with given.metrics.open("a") as file:
                print(json.dumps(report), file=file)
        else:
            print(f"step {step} loss {loss:.3f} reward {reward:.4f}", flush=True)
        if step % given.every == 0:
            folder = given.out / f"step-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "part").write_bytes(b"\0" * 4096)
            time.sleep(step_s)
            whole = folder / "state.json.whole"
            whole.write_text(json.dumps(state))
            whole.rename(folder / "state.json")


if __name__ == "__main__":
    main()
