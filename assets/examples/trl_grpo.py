"""An example: a script with TRL's GRPOTrainer that the launcher sees step by step, and that `run_control pause` holds.

    PYTHONPATH=<checkout of the launcher> python -m launcher conf=trl trainer.python=/path/to/venv/bin/python \
        trainer.command='python trl_grpo.py --output_dir out --save_steps 20' \
        trainer.metrics=out/steps.jsonl trainer.checkpoints='out/checkpoint-*'

TRL's environment needs nothing of the launcher but its checkout on the path, or a copy of the one file that is
imported. Without the launcher the script trains as before.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from launcher.adapters.trainer_callback import LauncherCallback

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def digits(completions: list[str], **_: Any) -> list[float]:
    """The share of digits: in place of a reward function of your own."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
    data = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(1, 20) for b in range(1, 20)])
    trainer = GRPOTrainer(
        model=MODEL, reward_funcs=digits, args=args, train_dataset=data, callbacks=[LauncherCallback()]
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
