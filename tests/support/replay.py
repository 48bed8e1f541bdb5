"""Rollouts that depend on the prompt and the weight version alone: the same run, fed the same rollouts, twice."""

import hashlib

from actors.data.prompt_queue import PromptQueue
from actors.rollout.live_rollouts import Stopped
from launcher.base.messages import EvalReport
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutBatch, RolloutGroup

VOCABULARY = range(5, 60)


def prompts(count):
    return {f"p{i:03d}": Prompt(id=f"p{i:03d}", token_ids=(5 + i % 7, 6, 7), record={}) for i in range(count)}


def digits(*parts):
    """64 numbers below 256, the same for the same parts."""
    return list(hashlib.sha512(":".join(map(str, parts)).encode()).digest())


def group(prompt, n_samples, version):
    rollouts = []
    for sample in range(n_samples):
        numbers = digits(prompt.id, version, sample)
        tokens = tuple(VOCABULARY[n % len(VOCABULARY)] for n in numbers[: 3 + numbers[0] % 6])
        completion = Completion(
            token_ids=tokens,
            logprobs=tuple(-4 + n / 512 for n in numbers[10 : 10 + len(tokens)]),
            weight_version=version,
            finish_reason="stop",
        )
        rollouts.append(Rollout(completion=completion, text="", reward=float(numbers[63] % 2)))
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


class Replay:
    """A source of rollouts. `spoil` may change a batch; from step `stop_at` on it says that a stop was asked for."""

    def __init__(self, items, n_samples, *, spoil=lambda batch: batch, stop_at=None):
        self._items = items
        self._n_samples = n_samples
        self._spoil = spoil
        self._stop_at = stop_at

    def collect(self, queue: PromptQueue, *, want, weight_version):
        if self._stop_at is not None and weight_version >= self._stop_at:
            queue.take(1)  # what was in flight when the stop came
            raise Stopped
        taken = queue.take(want)
        assert taken, "an epoch that never ends: what was trained on was not committed"
        groups = tuple(group(self._items[i], self._n_samples, weight_version) for i in taken)
        tokens = sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)
        return self._spoil(RolloutBatch(groups=groups, failed=0, retried=0, generated_tokens=tokens, seconds=0.1))

    def evaluate(self, weight_version):
        return EvalReport(policy_version=weight_version, prompts=4, sampled=0.5, greedy=0.5)
