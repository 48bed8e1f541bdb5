"""What model, tokenizer and template contradict each other in; and no text is glued over a mark that was dropped."""

import json
import shutil

import pytest

from actors.data.turn_ends import completion_texts, find_end_notes
from actors.model.model_folder import load_tokenizer
from launcher.config.compose import REPOSITORY
from launcher.config.data import ChatConfig

MODEL = REPOSITORY / "assets" / "arithmetic" / "model"
EACH = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
INST = "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}"
INST += "<|im_end|>{% endif %}{% endfor %}"


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)

    def made(template=None, **files):
        for name, changes in files.items():
            path = folder / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        if template is not None:
            (tmp_path / "t.jinja").write_text(template)
        chat = ChatConfig(template=None if template is None else str(tmp_path / "t.jinja"))
        return list(find_end_notes(load_tokenizer(folder, key="tokenizer_path"), chat, folder))

    return made


BASE = {"eos_token": "<|endoftext|>", "extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}


def test_an_end_that_is_none_of_the_models_is_told(notes):
    assert notes() == []
    assert notes(generation_config={"eos_token_id": 274}, config={"eos_token_id": 274}) == [], "the tokenizer names it"
    (note,) = notes(tokenizer_config=BASE)
    assert "ends an answer with <|im_end|> (276), which is none of the model's end tokens <|endoftext|> (274)" in note
    assert notes(generation_config={"eos_token_id": [274, 276]}) == []


def test_no_end_at_all_is_told(notes):
    changes = {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": None}}
    (note,) = notes(tokenizer_config=BASE | {"eos_token": None}, **changes)
    assert note.startswith("no end token is named by ")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (EACH, ["ignores add_generation_prompt: a prompt ends without '<|im_start|>assistant\\n'"]),
        (EACH + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", []),
        (INST, []),
        (INST.replace("<|im_end|>", ""), ["ends an answer with '', and with none of the model's end tokens"]),
        ("{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}", ["ends an answer with <|im_start|> (275)"]),
    ],
)
def test_templates_that_begin_or_end_no_answer_are_told(notes, template, said):
    found = notes(template)
    assert len(found) == len(said)
    assert all(part in note for part, note in zip(said, found, strict=True))


TURNS = "{% for m in messages %}{{ {'user': '<|im_end|>', 'assistant': '<|im_start|>'}[m.role] }}{{ m.content }}"
TURNS += "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"


def test_a_turn_may_end_with_the_mark_that_begins_the_next_one(notes):
    assert notes(TURNS) == []
    (note,) = notes(TURNS, tokenizer_config=BASE, generation_config={"eos_token_id": 274}, config={"eos_token_id": 274})
    assert "none of the model's end tokens <|endoftext|> (274)" in note


def test_a_mark_within_a_completion_stays_and_those_at_its_end_go():
    tokenizer = load_tokenizer(MODEL, key="tokenizer_path")
    parts = ("#### 7", "<|im_end|>", "4")
    before, end, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in parts)
    made = [[*before, *end, *after], [*before, *after, *end, 274], [*end], []]
    assert completion_texts(tokenizer, made) == ["#### 7<|im_end|>4", "#### 74", "", ""]
