"""Rollouts that depend on the prompt and the weight version alone: the same run, fed the same rollouts, twice."""

import hashlib
from dataclasses import replace

from actors.data.prompt_queue import PromptQueue
from actors.episodes.transcript import Turn, segments_of, whole_completion
from actors.rollout.rollout_engine import Stopped
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


def as_episodes(batch):
    """Of each rollout an episode: its first two tokens are an answer, the others follow a tool's result, and once more
    in a branch."""
    return replace(
        batch, groups=tuple(replace(g, rollouts=tuple(_episode(g.prompt, r) for r in g.rollouts)) for g in batch.groups)
    )


def _episode(prompt, rollout):
    made = rollout.completion

    def turn(before, given, part):
        answer = replace(made, token_ids=made.token_ids[part], logprobs=made.logprobs[part])
        return Turn(before=before, messages=(), tools=(), given=given, completion=answer)

    first = turn(None, prompt.token_ids, slice(2))
    turns = [first, turn(first, (8, 9), slice(2, None)), turn(first, (10,), slice(2, None))]
    return replace(rollout, completion=whole_completion(turns), segments=segments_of(turns), turns=len(turns))


class Replay:
    """A source of rollouts. `spoil` may change a batch; from step `stop_at` on it says that a stop was asked for."""

    def __init__(self, items, n_samples, *, spoil=lambda batch: batch, stop_at=None):
        self._items = items
        self._n_samples = n_samples
        self._spoil = spoil
        self._stop_at = stop_at

    def collect(self, queue: PromptQueue, *, want, weight_version):
        if self._stop_at is not None and weight_version >= self._stop_at:
            queue.take_prompts(1)  # what was in flight when the stop came
            raise Stopped
        taken = queue.take_prompts(want)
        assert taken, "an epoch that never ends: what was trained on was not committed"
        groups = tuple(group(self._items[i], self._n_samples, weight_version) for i in taken)
        tokens = sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)
        return self._spoil(RolloutBatch(groups=groups, failed=0, retried=0, generated_tokens=tokens, seconds=0.1))

    def evaluate(self, weight_version):
        return EvalReport(policy_version=weight_version, prompts=4, sampled=0.5, greedy=0.5)
