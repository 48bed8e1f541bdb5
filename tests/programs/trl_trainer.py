"""A script with TRL's GRPOTrainer, as anybody would write it, and one fault: where the file `damage` is there, the
weights are damaged, so that rewards are 0 until an earlier checkpoint is loaded."""

import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import HfArgumentParser, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MODEL = str(Path(__file__).parents[2] / "assets" / "arithmetic" / "model")
DAMAGE = 1000.0


class Fault(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        if Path("damage").exists():
            Path("damage").unlink()
            next(model.parameters()).data.view(-1)[0] = DAMAGE


def main() -> None:
    (args,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(sys.argv[1:])

    def digits(completions, **_):
        """The share of digits."""
        time.sleep(0.15)
        if next(trainer.model.parameters()).view(-1)[0].item() > DAMAGE / 2:
            return [0.0] * len(completions)
        return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]

    data = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(1, 20) for b in range(1, 20)])
    trainer = GRPOTrainer(model=MODEL, reward_funcs=digits, args=args, train_dataset=data, callbacks=[Fault()])
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
