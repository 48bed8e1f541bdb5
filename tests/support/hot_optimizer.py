"""Optimizers that ruin a policy: by a learning rate that is once, for three steps, twenty times what it is told, and by
a weight that is no number."""

import os
from pathlib import Path

import torch

MARK = "GRPO_TEST_WAS_HOT"
"""In its environment: the file by which a trainer that was restored knows that it has been."""
FIRST, STEPS, FACTOR = 40, 3, 20.0


class HotAdamW(torch.optim.AdamW):
    """The first hot step leaves the mark: who is restored is hot no more, also where it was found before the last."""

    hot_at = -1  # the last step, where it was hot

    def step(self, closure=None):
        mark = Path(os.environ[MARK])
        done = max((int(state["step"]) for state in self.state.values()), default=0)
        is_hot = FIRST <= done < FIRST + STEPS and (not mark.exists() or self.hot_at == done - 1)
        self.hot_at = done if is_hot else -1
        told = [group["lr"] for group in self.param_groups]
        for group, lr in zip(self.param_groups, told, strict=True):
            group["lr"] = lr * FACTOR if is_hot else lr
        try:
            return super().step(closure)
        finally:
            for group, lr in zip(self.param_groups, told, strict=True):
                group["lr"] = lr
            if is_hot:
                mark.touch()


POISON = "GRPO_TEST_POISON"
"""In its environment: a file; where it is, the next step leaves a NaN among the weights, and removes it."""


class PoisonedAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        stepped = super().step(closure)
        if (told := Path(os.environ[POISON])).exists():
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] = torch.nan
            told.unlink()
        return stepped
