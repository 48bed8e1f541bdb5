"""The default experiment as shipped: problems that are right and kept apart, a model folder that is whole and small."""

import json
import re
import struct
from pathlib import Path

import jinja2
import pytest
import yaml
from tokenizers import Tokenizer

from scripts.make_arithmetic import TURN_END, make_tokenizer, solution, split_problems

ROOT = Path(__file__).parents[3]
ASSETS = ROOT / "assets" / "arithmetic"
MODEL = ASSETS / "model"
PRESET = yaml.safe_load((ROOT / "conf" / "conf" / "arithmetic_cpu.yaml").read_text())

TEMPLATE = jinja2.Template((MODEL / "chat_template.jinja").read_text())


def records(name):
    return [json.loads(line) for line in (ASSETS / f"{name}.jsonl").read_text().splitlines()]


def prompt(question):
    return TEMPLATE.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_the_whole_folder_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 3 * 2**20


def test_training_and_held_out_problems_are_many_and_share_none():
    train, test = ([record["question"] for record in records(name)] for name in ("train", "test"))
    assert len(train) >= 3200
    assert len(test) >= 256
    assert len(set(train + test)) == len(train) + len(test)


@pytest.mark.parametrize("name", ["train", "test"])
def test_every_answer_adds_up(name):
    for record in records(name):
        a, b, c = map(int, re.fullmatch(r"(\d+)\+(\d+)\+(\d+)=\?", record["question"]).groups())
        assert record["answer"] == f"{a}+{b}={a + b}\n{a + b}+{c}={a + b + c}\n#### {a + b + c}"


def test_the_script_makes_these_files(tmp_path):
    for name, problems in zip(("train", "test"), split_problems(), strict=True):
        made = [{"question": problem.question, "answer": solution(problem)} for problem in problems]
        assert records(name) == made
    make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (MODEL / name).read_text()


@pytest.mark.parametrize("text", ["47+8=55\n55+6=61\n#### 61", "Wörter, 数 and \t tabs", ""])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_prompt_is_a_turn_of_the_user_and_the_opening_of_the_model(tokenizer):
    text = prompt("47+8+6=?")
    assert text == "<|im_start|>user\n47+8+6=?<|im_end|>\n<|im_start|>assistant\n"
    pieces = tokenizer.encode(text).tokens
    assert [piece for piece in pieces if len(piece) > 1] == [
        *["<|im_start|>", "user", TURN_END],
        *["<|im_start|>", "assistant"],
    ]


@pytest.mark.slow
def test_every_solution_fits_the_preset(tokenizer):
    limit = PRESET["gconfig"]["max_new_tokens"]
    for record in records("train") + records("test"):
        question = len(tokenizer.encode(prompt(record["question"])).ids)
        answer = len(tokenizer.encode(record["answer"] + TURN_END).ids)
        assert answer <= limit
        assert question + limit <= PRESET["sglang"]["context_length"]


def test_generation_ends_at_the_end_of_a_turn(tokenizer):
    end = tokenizer.token_to_id(TURN_END)
    assert json.loads((MODEL / "config.json").read_text())["eos_token_id"] == end
    assert end in json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    assert json.loads((MODEL / "tokenizer_config.json").read_text())["eos_token"] == TURN_END


def test_the_weights_are_float32_and_cover_the_vocabulary(tokenizer):
    with (MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    assert {tensor["dtype"] for tensor in header.values()} == {"F32"}
    assert header["model.embed_tokens.weight"]["shape"][0] == tokenizer.get_vocab_size()
