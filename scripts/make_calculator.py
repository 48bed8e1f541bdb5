"""Makes assets/calculator: problems that need a calculator, and a model that knows how to ask one, but seldom does.

    python -m scripts.make_calculator [--out assets/calculator]

A problem is `47*8+6=?`. The model is taught by three kinds of example: it asks the calculator for all of it and copies
the result (a quarter), it asks for the product alone and copies that (another), or it guesses. So it gets about a
quarter of its samples right, and greedy it guesses. To be right it must ask, ask the right thing, and copy: two turns.

It begins as the model of scripts/make_arithmetic.py, which can copy numbers. Everything is seeded, and on one thread.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from actors.reward.calculator import TOOLS, calculate
from scripts.ending import DONE, ended
from scripts.make_arithmetic import ASSETS, IGNORED, SEED, TURN_END, begin, make_tokenizer, padded, save, warm_start

TEST_PROBLEMS = 256
STEPS, BATCH = 250, 32
ASKS_ALL, ASKS_PRODUCT = 0.25, 0.5
"""Shares of the examples, the second with the first."""
CALL_PARTS = ("<tool_call>", '{"name": "calculator", "arguments": {"expression": "', '"}}', "</tool_call>")
"""One token each, so that a call takes a dozen."""
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def all_problems() -> list[str]:
    return [f"{a}*{b}+{c}" for a in range(12, 100) for b in range(3, 10) for c in range(2, 10)]


def arguments_of(expression: str) -> str:
    return json.dumps({"expression": expression})


def tokenizer_with_calls() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in CALL_PARTS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def taught(problem: str, rng: random.Random) -> list[tuple[str, str]]:
    """What the teacher says, and the tool's answer to it where there is one."""
    drawn = rng.random()
    if drawn > ASKS_PRODUCT:
        return [(f"#### {rng.randint(40, 900)}", "")]
    asked = problem if drawn < ASKS_ALL else problem.partition("+")[0]
    opens, begins, ends, closes = CALL_PARTS
    result = calculate(arguments_of(asked))
    return [(f"{opens}{begins}{asked}{ends}{closes}", result), (f"#### {result}", "")]


def lesson(problem: str, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int]]:
    """Input ids and labels: what the teacher says is learned, as the template has it in an episode."""
    asked = [{"role": "user", "content": f"{problem}=?"}]
    text = tokenizer.apply_chat_template(asked, tools=[*TOOLS], tokenize=False, add_generation_prompt=True)
    parts = [(text, False)]
    for said, result in taught(problem, rng):
        parts.append((said + TURN_END, True))
        if result:
            parts.append((f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n", False))
    ids: list[int] = []
    labels: list[int] = []
    for part, is_learned in parts:
        tokens = tokenizer.encode(part)
        ids += tokens
        labels += tokens if is_learned else [IGNORED] * len(tokens)
    return ids, labels


def lessons(
    problems: Sequence[str], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches, each [BATCH, longest]."""
    while True:
        yield padded([lesson(problem, tokenizer, rng) for problem in rng.sample(problems, BATCH)], tokenizer)


def write_records(path: Path, problems: Sequence[str]) -> None:
    records = ({"question": f"{one}=?", "answer": f"#### {calculate(arguments_of(one))}"} for one in problems)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> int:
    return ended(_make)


def _make() -> int:
    out = begin("calculator", (__doc__ or "").splitlines()[0])
    problems = all_problems()
    random.Random(SEED).shuffle(problems)
    test, train = problems[:TEST_PROBLEMS], problems[TEST_PROBLEMS:]
    write_records(out / "train.jsonl", train)
    write_records(out / "test.jsonl", test)
    tokenizer = tokenizer_with_calls()
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "arithmetic" / "model", trust_remote_code=False)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    warm_start(model, lessons(train, tokenizer, random.Random(SEED)), steps=STEPS)
    save(out, model, tokenizer, len(train), len(test))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
