"""A trainer of several ranks, for torchrun: each step is a sum over all of them (gloo); the first reports and saves.

What it learns is a number that depends on every step and on every rank.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {"step": 0, "weight": 1}
    if given.resume:
        state = json.loads((given.resume / "state.json").read_text())
    while state["step"] < given.steps:
        step = state["step"] = state["step"] + 1
        time.sleep(0.1)
        share = torch.tensor([state["weight"] * (rank + 1)])
        dist.all_reduce(share)
        state["weight"] = (int(share) + step) % 1_000_003
        if rank != 0:
            continue
        if step % 5 == 0:
            folder = Path("out") / f"step-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            whole = folder / "state.json.whole"
            whole.write_text(json.dumps(state))
            whole.rename(folder / "state.json")
        with given.metrics.open("a") as file:
            print(json.dumps({"step": step, "reward": 0.5, "time": time.time()}), file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
