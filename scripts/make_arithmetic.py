"""Makes assets/arithmetic: the problems, the tokenizer and the warm-started model of the default experiment.

    python -m scripts.make_arithmetic [--out assets/arithmetic]

A problem is `47+8+6=?`; its solution adds from left to right and ends as GSM8K does: `47+8=55\\n55+6=61\\n#### 61`.

The model is taught by supervised training, on the training problems only, by a teacher with one fault: where an
addition carries, it forgets the carry more often than not (`47+8=45`). So the model knows the format, gets about a
third of its samples right, and is wrong at temperature 0 wherever a carry is due, while the right answer is still
among its samples. That is what GRPO needs: an error of mere sampling noise would leave nothing to learn in greedy.

Everything is seeded, and on one thread.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from launcher.base.errors import StorageError
from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended

SEED = 20
FIRST = range(2, 82)  # the first operand; with the others every sum stays below 100
OTHERS = range(3, 10)  # the second and third
TEST_PROBLEMS = 256
FORGET_CARRY = 0.65  # chance that the teacher forgets a carry: above one half, so that greedy is wrong
# Long enough to tell where a carry is due: a shorter warm start (450 steps, peak 3e-3) was followed by a policy that
# carried everywhere and stayed at a reward of 0.65.
STEPS, BATCH, PEAK_LR, WARMUP_STEPS = 700, 64, 2e-3, 30
CONTEXT = 1024  # tokens; a problem takes about 40, the rest is there for whoever wants long generations

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Each word of the chat template, and GSM8K's marker, becomes one token; every other byte stays its own.
MERGES = [
    *[("#", "#"), ("##", "##")],
    *[("u", "s"), ("e", "r"), ("us", "er")],
    *[("a", "s"), ("as", "s"), ("i", "s"), ("is", "t"), ("ass", "ist"), ("a", "n"), ("an", "t"), ("assist", "ant")],
    *[("s", "y"), ("s", "t"), ("st", "e"), ("ste", "m"), ("sy", "stem")],
]
ASSETS = Path(__file__).parent.parent / "assets"
IGNORED = -100  # the label that cross-entropy leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblem:
    """`first + second + third`, added from left to right."""

    first: int
    second: int
    third: int

    @property
    def question(self) -> str:
        return f"{self.first}+{self.second}+{self.third}=?"


def all_problems() -> list[MathProblem]:
    return [MathProblem(first=a, second=b, third=c) for a in FIRST for b in OTHERS for c in OTHERS]


def split_problems() -> tuple[list[MathProblem], list[MathProblem]]:
    """Training and held-out problems: disjoint, in a seeded order."""
    problems = all_problems()
    random.Random(SEED).shuffle(problems)
    return problems[TEST_PROBLEMS:], problems[:TEST_PROBLEMS]


def add(left: int, right: int, forget: random.Random | None) -> int:
    """The sum; with `forget`, at times without its carry."""
    carries = left % 10 + right >= 10
    return left + right - 10 if carries and forget and forget.random() < FORGET_CARRY else left + right


def solution(problem: MathProblem, forget: random.Random | None = None) -> str:
    """The true solution, or one by the teacher who forgets carries (and continues from what it wrote)."""
    partial = add(problem.first, problem.second, forget)
    total = add(partial, problem.third, forget)
    return f"{problem.first}+{problem.second}={partial}\n{partial}+{problem.third}={total}\n#### {total}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in Qwen2's form: any text survives encoding and decoding; digits are single tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END_OF_TEXT, TURN_START, TURN_END)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    return model


def lessons(
    problems: Sequence[MathProblem], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches (input ids, labels), each [BATCH, longest]; only the solution and its end are learned."""
    prompts = {p: prompt_ids(p, tokenizer) for p in problems}
    while True:
        rows = []
        for problem in rng.sample(problems, BATCH):
            answer = tokenizer.encode(solution(problem, rng) + TURN_END)
            rows.append((prompts[problem] + answer, [IGNORED] * len(prompts[problem]) + answer))
        yield padded(rows, tokenizer)


def padded(
    rows: Sequence[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, each [rows, longest]."""
    assert isinstance(tokenizer.pad_token_id, int)
    longest = max(len(ids) for ids, _ in rows)
    return (
        torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]),
    )


def prompt_ids(problem: MathProblem, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    turns = [{"role": "user", "content": problem.question}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine to zero."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def warm_start(
    model: PreTrainedModel, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], *, steps: int = STEPS
) -> None:
    """Trains in place on the teacher's solutions, new ones in each batch (input ids, labels)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01)
    for step in range(steps):
        ids, labels = next(batches)
        loss = model(input_ids=ids, labels=labels).loss
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"warm start: step {step} of {steps}, loss {loss.item():.4f}", flush=True)


def write_records(path: Path, problems: Sequence[MathProblem]) -> None:
    lines = [json.dumps({"question": p.question, "answer": solution(p)}) + "\n" for p in problems]
    path.write_text("".join(lines), encoding="utf-8")


def begin(name: str, what: str) -> Path:
    """The folder of the command line, made. From here on all is seeded, and on one thread. Raises StorageError."""
    parser = Parser(f"make_{name}", what)
    parser.add_argument("--out", type=Path, default=ASSETS / name, metavar="FOLDER", help="default: %(default)s")
    out: Path = parser.parse_args().out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"--out {out} can't be made: {error.strerror}", "give another folder") from error
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the number of threads changes the order of sums, and so the last bits
    return out


def save(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, n_train: int, n_test: int) -> None:
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    print(f"wrote {out}: {n_train} training and {n_test} held-out problems, {model.num_parameters()} parameters")


def main() -> int:
    return ended(_make)


def _make() -> int:
    out = begin("arithmetic", (__doc__ or "").splitlines()[0])
    train, test = split_problems()
    write_records(out / "train.jsonl", train)
    write_records(out / "test.jsonl", test)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_start(model, lessons(train, tokenizer, random.Random(SEED)))
    save(out, model, tokenizer, len(train), len(test))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
