"""In place of TRL where it is not installed: its two names, over transformers' own Trainer.

A step predicts the prompt's next tokens, and generates nothing. The script's function scores the prompts.
"""

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from transformers import TrainingArguments as GRPOConfig

__all__ = ["GRPOConfig", "GRPOTrainer"]
STEP_S = 0.1


class GRPOTrainer(Trainer):
    def __init__(self, *, model, reward_funcs, args, train_dataset, callbacks):
        args.remove_unused_columns = False
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._reward = reward_funcs
        super().__init__(
            model=AutoModelForCausalLM.from_pretrained(model),
            args=args,
            train_dataset=train_dataset,
            data_collator=lambda rows: {"prompts": [row["prompt"] for row in rows]},
            callbacks=callbacks,
        )

    def compute_loss(self, model, inputs, *_, **__):
        time.sleep(STEP_S)  # as a step with rollouts: there must be steps left to be paused and killed in
        rewards = self._reward(completions=inputs["prompts"])
        self._logged = sum(rewards) / len(rewards)
        tokens = [self._tokenizer(text, return_tensors="pt")["input_ids"] for text in inputs["prompts"]]
        return torch.stack([model(input_ids=row, labels=row).loss for row in tokens]).mean()

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs["reward"] = self._logged
        super().log(logs, *args, **kwargs)
