"""Prompts made of records by a chat template: their tokens, their lengths, and templates that don't work."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actors.data.prompts import build_prompts
from launcher.base.errors import DataError, ModelError
from tests.support.worlds.data import RECORDS, TEMPLATE, load, write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token per character, loaded from a folder as a model's is."""
    characters = [chr(code) for code in range(32, 127)] + ["\n", "<unk>"]
    words = models.WordLevel({character: index for index, character in enumerate(characters)}, unk_token="<unk>")
    plain = Tokenizer(words)
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<unk>")
    fast.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def template(tokenizer):
    """Gives the tokenizer another chat template for one test."""

    def change(text):
        tokenizer.chat_template = text

    yield change
    tokenizer.chat_template = TEMPLATE


def prompts_of(tokenizer, records, *, max_prompt_tokens=None, max_length=None):
    return build_prompts(
        records, tokenizer, max_prompt_tokens=max_prompt_tokens, max_length=max_length, key="train_dataset"
    )


@pytest.fixture
def records(tmp_path):
    long = {"question": "q" * 40, "answer": "#### 1"}
    return load(write(tmp_path / "d.jsonl", [RECORDS[0], long, RECORDS[1]]))


def test_a_prompt_is_the_chat_template_of_its_question(tokenizer, records):
    prompts, left_out = prompts_of(tokenizer, records)
    assert left_out == 0
    assert [prompt.id for prompt in prompts] == [record.id for record in records]
    assert tokenizer.decode(prompts[0].token_ids).replace(" ", "") == "<user>0+1?\n<assistant>"
    assert type(prompts[0].token_ids) is tuple
    assert {type(token) for token in prompts[0].token_ids} == {int}
    assert prompts[0].record["answer"] == RECORDS[0]["answer"]


def test_more_prompts_than_are_tokenised_at_once(tokenizer, tmp_path):
    many = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(1100)]
    records = load(write(tmp_path / "d.jsonl", many))
    prompts, _ = prompts_of(tokenizer, records)
    assert [prompt.id for prompt in prompts] == [record.id for record in records]
    assert prompts[1099].token_ids == prompts_of(tokenizer, records[1099:])[0][0].token_ids


def test_prompts_over_max_length_are_left_out_and_counted(tokenizer, records):
    prompts, left_out = prompts_of(tokenizer, records, max_length=22, max_prompt_tokens=22)
    assert left_out == 1
    assert [prompt.record["question"] for prompt in prompts] == ["0+1?", "1+1?"]
    assert {len(prompt.token_ids) for prompt in prompts} == {22}


def test_a_prompt_longer_than_the_context(tokenizer, records):
    with pytest.raises(DataError) as error:
        prompts_of(tokenizer, records, max_prompt_tokens=30)
    message = str(error.value)
    assert f"{records[1].where}: the prompt" in message
    assert "has 58 tokens, and there is room for 30" in message
    assert "sglang.context_length - gconfig.max_new_tokens" in message
    assert "train_dataset.max_length=30" in message


def test_no_prompt_is_left(tokenizer, records):
    with pytest.raises(DataError, match=r"all 3 prompts of train_dataset are longer than train_dataset.max_length=5"):
        prompts_of(tokenizer, records, max_length=5)


def test_a_tokenizer_without_a_chat_template(tokenizer, template, records):
    template(None)
    with pytest.raises(ModelError) as error:
        prompts_of(tokenizer, records)
    assert f"the tokenizer of {tokenizer.name_or_path!r} has no chat template" in str(error.value)
    assert "tokenizer_path" in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('system first') }}", "can't write a user's message: system first"),
        ("{% for ", "can't write a user's message"),
        ("{# nothing #}", "writes an empty prompt"),
    ],
)
def test_a_chat_template_that_does_not_work(tokenizer, template, records, text, said):
    template(text)
    with pytest.raises(ModelError, match=said):
        prompts_of(tokenizer, records)
