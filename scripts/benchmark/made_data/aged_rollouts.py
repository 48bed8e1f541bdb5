"""What staleness alone costs: GRPO steps in one process, whose completions are made by weights of an exact age.

The launcher's own model, objective, prompt queue and reward of GSM8K; no server, no supervision, nothing timed. Tokens
are drawn by the plain model of transformers, with the generator of a seed, so that runs of one seed begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.data.prompt_queue import PromptQueue
from actors.data.training_data import DataLoader
from actors.model.policy_model import PolicyModel
from actors.reward import gsm8k_reward
from actors.reward.data_check import records_of
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutGroup
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal

HELD_OUT_SAMPLES = 4
HELD_OUT_SEED = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class AgedRun:
    """`reward`: the mean of each step, of the weights that made its batch; `held_out`: after the last one, sampled."""

    ahead: int
    seed: int
    reward: tuple[float, ...]
    held_out: float


def learn(config: RunConfig, journal: Journal, *, ahead: int, steps: int) -> AgedRun:
    """`steps` steps, of which each trains on what weights of `ahead` versions before made, or the first ones."""
    torch.set_num_threads(1)
    n_samples, size = config.gconfig.n_samples, config.train_dataset.batch_size
    policy = PolicyModel(config.actor, config.ref, temperature=config.gconfig.temperature, total_steps=steps)
    records = {key: records_of(one, None, key=key)[0] for key, one in config.datasets().items()}
    data = DataLoader(config, policy.tokenizer, config.sglang.context_length, journal).load(records)
    queue = PromptQueue([*data.prompts], seed=config.seed, shuffle=True)
    sampler = Sampler(config, policy)
    versions: list[dict[str, Tensor]] = []
    rewards = []
    for step in range(steps):
        versions = [*versions, weights_of(policy)][-ahead - 1 :]
        sampler.load(versions[0])
        ids = queue.take(size)
        groups = sampler.groups([data.prompts[one] for one in ids], n_samples, seed=config.seed * 100_003 + step)
        policy.compute_gradients(groups)
        policy.step_ahead()
        policy.commit()
        queue.commit(ids)
        rewards.append(mean_reward(groups))
    sampler.load(weights_of(policy))
    held_out = sampler.groups([*data.held_out.values()], HELD_OUT_SAMPLES, seed=HELD_OUT_SEED)
    return AgedRun(ahead=ahead, seed=config.seed, reward=tuple(rewards), held_out=mean_reward(held_out))


def weights_of(policy: PolicyModel) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in policy.named_weights(torch.float32)}


def mean_reward(groups: Sequence[RolloutGroup]) -> float:
    return fmean(one.reward or 0.0 for group in groups for one in group.rollouts)


class Sampler:
    """Draws completions at temperature 1, with the log-probs of their tokens."""

    def __init__(self, config: RunConfig, policy: PolicyModel) -> None:
        self._tokenizer: Any = policy.tokenizer
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            policy.folder, dtype=torch.float32, trust_remote_code=False
        )
        ends = self._model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._most = config.gconfig.max_new_tokens

    def load(self, weights: dict[str, Tensor]) -> None:
        self._model.load_state_dict(weights, strict=False)  # a tied head has no name of its own

    def groups(self, prompts: Sequence[Prompt], n_samples: int, *, seed: int) -> list[RolloutGroup]:
        """All with their rewards."""
        made = self._completions([one.token_ids for one in prompts for _ in range(n_samples)], seed)
        texts = self._tokenizer.batch_decode([one.token_ids for one in made], skip_special_tokens=True)
        groups = []
        for place, prompt in enumerate(prompts):
            own = slice(place * n_samples, (place + 1) * n_samples)
            pairs = zip(made[own], texts[own], strict=True)
            rollouts = tuple(Rollout(completion=one, text=text, reward=_score(text, prompt)) for one, text in pairs)
            groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
        return groups

    @torch.no_grad()
    def _completions(self, prompts: Sequence[tuple[int, ...]], seed: int) -> list[Completion]:
        draw, width = torch.Generator().manual_seed(seed), max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions, past = (mask.cumsum(1) - 1).clamp(min=0), None
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for _ in range(self._most):
            said = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True
            )
            past, found = said.past_key_values, said.logits[:, -1].float().log_softmax(-1)
            ids = torch.multinomial(found.exp(), 1, generator=draw)
            tokens.append(ids[:, 0])
            logprobs.append(found.gather(1, ids)[:, 0])
            mask, positions = torch.cat([mask, torch.ones_like(ids)], 1), positions[:, -1:] + 1
        rows = zip(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
        return [self._completion(row, of_row) for row, of_row in rows]

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        end = next((place + 1 for place, one in enumerate(tokens) if one in self._ends), None)
        return Completion(
            token_ids=tuple(tokens[:end]),
            logprobs=tuple(logprobs[:end]),
            weight_version=0,
            finish_reason="length" if end is None else "stop",
        )


def _score(text: str, prompt: Prompt) -> float:
    return gsm8k_reward(completion=text, answer=str(prompt.answer), prompt_id=prompt.id, record=prompt.record)
