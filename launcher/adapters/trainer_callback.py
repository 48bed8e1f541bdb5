"""A callback for the trainers of transformers and TRL: it reports each step to the launcher, and obeys a pause.

    GRPOTrainer(…, callbacks=[LauncherCallback()])      # python -m launcher conf=trl trainer.metrics=out/steps.jsonl …

It imports nothing of the launcher, so this file can be copied beside the script. The launcher names both files in the
environment (docs/adapters.md); where they are not named, the callback does nothing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

LOOK_S = 0.5


class LauncherCallback(TrainerCallback):
    """`steps`: the JSONL file that each step is appended to. `requests`: the run's file with what a person wants."""

    def __init__(self, steps: str | None = None, requests: str | None = None) -> None:
        self._steps = steps or os.environ.get("GRPO_TRAINER_STEPS", "")
        self._requests = requests or os.environ.get("GRPO_TRAINER_REQUESTS", "")
        self._is_wanted = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The line break ends a line that a killed trainer left torn, else the first new line would be lost with it.
        self._append(state, {"grpo_paused": False}, before="\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step before is logged and saved, and the rollouts of the next one are not begun."""
        if not self._is_pause_wanted(args):
            return
        self._append(state, {"grpo_paused": True})
        while self._is_pause_wanted(args):
            time.sleep(LOOK_S)
        self._append(state, {"grpo_paused": False})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = True  # whatever logging_steps is: the launcher judges each step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and ("reward" in logs or "loss" in logs):  # not of an evaluation, nor the summary at the end
            self._append(
                state, {key: float(logs[key]) for key in ("reward", "reward_std", "loss", "grad_norm") if key in logs}
            )

    def _append(self, state: Any, figures: dict[str, Any], before: str = "") -> None:
        if self._steps and state.is_world_process_zero:
            Path(self._steps).parent.mkdir(parents=True, exist_ok=True)
            with Path(self._steps).open("a") as file:
                file.write(before + json.dumps({"step": state.global_step, "time": time.time(), **figures}) + "\n")

    def _is_pause_wanted(self, args: Any) -> bool:
        """Rank 0 decides for all: one that goes on alone would wait in a collective until that times out."""
        if not (self._steps and self._requests):
            return False  # a trainer that can't report its pause would be ended as hung
        wanted = torch.tensor([self._read_request()], device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(wanted, src=0)
        return bool(wanted.item())

    def _read_request(self) -> bool:
        try:
            self._is_wanted = json.loads(Path(self._requests).read_text()).get("wish") == "pause"
        except FileNotFoundError:
            self._is_wanted = False
        except (OSError, ValueError) as error:  # its disk does not answer: what was asked before holds on
            print(f"{self._requests} can't be read: {error}", flush=True)
        return self._is_wanted
