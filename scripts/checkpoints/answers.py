"""Lets two checkpoints answer the same held-out prompts, greedily, each in a real SGLang server of its own."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import LauncherError, ModelError, UsageError
from launcher.base.rollouts import Completion, Prompt
from launcher.config.compose import compose
from launcher.config.schema import RunConfig

if TYPE_CHECKING:
    from launcher.run_files.run_keys import ServerKeys

SURE = 0.05
"""Of the sign test: B is called worse where so many lost prompts would be this rare by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`reward` None: it could not be scored, and `text` is what was to be."""

    text: str
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """To the same prompts, by A and by B."""

    questions: tuple[str, ...]
    a: tuple[Answer, ...]
    b: tuple[Answer, ...]

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """The rewards of prompts that both were scored on."""
        scored = ((one.reward, other.reward) for one, other in zip(self.a, self.b, strict=True))
        return [(one, other) for one, other in scored if one is not None and other is not None]

    @property
    def against(self) -> tuple[str, ...]:
        worse, better = (sum(sign * (b - a) > 0 for a, b in self.pairs) for sign in (-1, 1))
        n = worse + better
        chance = sum(math.comb(n, k) for k in range(worse, n + 1)) / 2**n
        if worse > better and chance < SURE:
            return (f"B answers worse: lower rewards on {worse} prompts, higher on {better} (by chance {chance:.2g})",)
        return ()

    def sentence(self) -> str:
        pairs = self.pairs
        if not pairs:
            return "no answer could be scored"
        means = [math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        same = sum(one.text == other.text for one, other in zip(self.a, self.b, strict=True))
        return (
            f"{len(pairs)} of {len(self.questions)} prompts scored: mean of A {means[0]:.3f}, of B {means[1]:.3f}; "
            f"{same} answers are the same text"
        )

    def lines(self) -> Iterator[str]:
        for question, *both in zip(self.questions, self.a, self.b, strict=True):
            said = (f"{name} {_shown(one.reward)} {_short(one.text)!r}" for name, one in zip("AB", both, strict=True))
            yield f"{_short(question)!r}: {'; '.join(said)}"

    def facts(self) -> dict[str, object]:
        rows = zip(self.questions, self.a, self.b, strict=True)
        both = [
            {"question": q, "a": a.text, "b": b.text, "a_reward": a.reward, "b_reward": b.reward} for q, a, b in rows
        ]
        return {"sentence": self.sentence(), "prompts": both}


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:30]} … {text[-27:]}"


def _shown(reward: float | None) -> str:
    return "not scored" if reward is None else f"{reward:g}"


def ask(settings: Sequence[str], folders: tuple[Path, Path], count: int) -> Answers:
    """The first `count` held-out prompts. Raises LauncherError: no such data, or a server does not start."""
    texts, said = list[str](), list[tuple[Answer, ...]]()
    for folder in folders:
        path = folder.absolute()
        config = compose([*settings, f"actor.path={path}", f"tokenizer_path={path}"])
        config = replace(config, sglang=replace(config.sglang, model_path=str(path)))
        questions, answers = _answers(config, path, count)
        texts, said = questions, [*said, answers]
    return Answers(questions=tuple(texts), a=said[0], b=said[1])


def _answers(config: RunConfig, folder: Path, count: int) -> tuple[list[str], tuple[Answer, ...]]:
    from actors.data.dataset import load_records
    from actors.data.prompts import build_prompts
    from actors.model.model_folder import load_tokenizer
    from actors.reward.reward_functions import RewardFunctions
    from scripts.running_server import running_server

    if config.valid_dataset is None:
        raise UsageError(
            "the settings have no valid_dataset, so there are no held-out prompts", "set valid_dataset.path"
        )
    dataset = replace(config.valid_dataset, max_items=min(config.valid_dataset.max_items or count, count))
    records = load_records(dataset, key="valid_dataset")
    tokenizer = load_tokenizer(folder, key="A or B")
    prompts, _ = build_prompts(
        records, tokenizer, max_prompt_tokens=None, max_length=dataset.max_length, key="valid_dataset", chat=config.chat
    )
    print(f"asking {folder.name}: {len(prompts)} prompts", file=sys.stderr, flush=True)
    with running_server(config) as (info, keys):
        completions = asyncio.run(_complete(config, info.url, keys, prompts))
    texts = [str(tokenizer.decode(list(one.token_ids), skip_special_tokens=True)) for one in completions]
    items = [
        {
            "completion": text,
            "answer": prompt.answer,
            "prompt_id": prompt.id,
            "record": prompt.record,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "group": [text],
        }
        for prompt, text, completion in zip(prompts, texts, completions, strict=True)
    ]
    scores = RewardFunctions(config.reward.fn, config.reward.weights, config.reward.timeout).score(items)
    values = (value if isinstance(value := score.get("value"), float | int) else None for score in scores)
    questions = {record.id: record.question for record in records}
    answers = tuple(Answer(text=text, reward=value) for text, value in zip(texts, values, strict=True))
    return [questions[prompt.id] for prompt in prompts], answers


async def _complete(config: RunConfig, url: str, keys: ServerKeys, prompts: Sequence[Prompt]) -> list[Completion]:
    from actors.serving.sglang_client import Sampling, SGLangClient

    greedy = replace(Sampling.from_config(config.gconfig), temperature=0.0, top_p=1.0, min_new_tokens=0)
    limit = asyncio.Semaphore(16)

    async def one(client: SGLangClient, prompt: Prompt) -> Completion:
        async with limit:
            try:
                return await client.generate(
                    url, token_ids=prompt.token_ids, sampling=greedy, timeout_s=config.rollout.request_timeout
                )
            except LauncherError as error:
                raise ModelError(f"the server gave no answer: {error.message}", "is the model sound?") from error

    async with SGLangClient(keys) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))
