"""Chats as the shipped model's own tokenizer writes them: system prompts, tools, templates by file and by name."""

import pytest
from transformers import AutoTokenizer

from actors.data.dataset import BadRecords
from actors.data.prompts import build_prompts
from launcher.base.errors import ConfigError, DataError, ModelError
from launcher.config.compose import REPOSITORY
from launcher.config.data import ChatConfig, DatasetConfig
from tests.support.worlds.data import CHAT, RECORDS, load, write

MODEL = REPOSITORY / "assets" / "arithmetic" / "model"
TOOL = {"type": "function", "function": {"name": "add"}}
THINKING = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if tools %}{{ tools | length }} tools;{% endif %}{% if enable_thinking is false %}<no>{% endif %}"
)
STRICT = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def texts(tokenizer, records, chat=None, **more):
    prompts, _ = build_prompts(
        records, tokenizer, max_prompt_tokens=None, max_length=None, key="train_dataset", chat=chat, **more
    )
    return [tokenizer.decode(prompt.token_ids) for prompt in prompts]


def test_questions_are_written_as_before(tokenizer, tmp_path):
    (text,) = texts(tokenizer, load(write(tmp_path / "d.jsonl", RECORDS[:1])))
    assert text == "<|im_start|>user\n0+1?<|im_end|>\n<|im_start|>assistant\n"


def test_messages_with_a_system_prompt_of_their_own_or_of_the_run(tokenizer, tmp_path):
    rows = [{"messages": CHAT, "answer": 4}, {"messages": CHAT[1:], "answer": 4}]
    records = load(write(tmp_path / "d.jsonl", rows), messages_key="messages")
    own = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizer, records, ChatConfig(system_prompt="Think.")) == [own, own.replace("Be brief.", "Think.")]
    assert "system" not in texts(tokenizer, records)[1]


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_a_system_prompt_that_the_template_refuses_or_leaves_out_is_accused_and_no_record(tokenizer, tmp_path):
    tokenizer.chat_template = NO_SYSTEM
    records = load(write(tmp_path / "d.jsonl", RECORDS[:2]))
    bad = BadRecords(DatasetConfig(bad_records="skip"))
    said = r"chat.system_prompt='Hi': the chat template of .* no system role"
    for more in ({}, {"bad": bad}):
        with pytest.raises(ConfigError, match=said) as error:
            texts(tokenizer, records, ChatConfig(system_prompt="Hi"), **more)
        assert "leave chat.system_prompt out" in error.value.hint
        assert "d.jsonl" not in str(error.value)
    assert bad.count == 0
    assert texts(tokenizer, records) == ["0+1?", "1+1?"]
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"chat.system_prompt='Hi': the chat template of .* writes no system message"):
        texts(tokenizer, records, ChatConfig(system_prompt="Hi"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    assert texts(tokenizer, records[:1], ChatConfig(system_prompt="A\n'B'"))[0].startswith('"A\\n')
    own = [{"messages": CHAT, "answer": 4}]
    records = load(write(tmp_path / "own.jsonl", own), messages_key="messages")
    tokenizer.chat_template = NO_SYSTEM
    with pytest.raises(DataError, match=r"own.jsonl:1: the chat template .* no system role") as refused:
        texts(tokenizer, records)
    assert refused.value.hint == "drop the system messages, or set chat.template to one that writes them"


def test_a_template_that_takes_no_parts_is_said_to_take_none(tokenizer, tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}]
    records = load(write(tmp_path / "d.jsonl", [{"messages": parts, "answer": 4}]), messages_key="messages")
    tokenizer.chat_template = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
    with pytest.raises(DataError, match=r"d.jsonl:1: the chat template .*can only concatenate") as refused:
        texts(tokenizer, records)
    assert refused.value.hint == "give each content as one text, or set chat.template to one that takes a list of parts"
    tokenizer.chat_template = "{{ raise_exception('never') if messages[0].content != '?' else '?' }}"
    with pytest.raises(DataError) as refused:
        texts(tokenizer, records)
    assert refused.value.hint == "repair the record; bad_records=skip leaves such records out"


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}, {"type": "text", "content": "2?"}])
def test_a_text_part_without_a_text_is_refused(tmp_path, part):
    rows = [{"messages": [{"role": "user", "content": [{"type": "text", "text": "1?"}, part]}], "answer": 4}]
    with pytest.raises(DataError, match=r"(?s)d.jsonl:1: messages\[0\] has the content .*only texts are trained on"):
        load(write(tmp_path / "d.jsonl", rows), messages_key="messages")


def test_a_suffix_is_written_behind_what_the_user_said_last(tokenizer, tmp_path):
    """Of a list of parts too, and without any template: how the answer is to be marked belongs to the question."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}]
    called = [*CHAT[1:], {"role": "assistant", "content": "a call"}, {"role": "tool", "content": "4"}]
    rows = [{"messages": chat, "answer": 4} for chat in (CHAT, parts, called)]
    records = load(write(tmp_path / "d.jsonl", rows), messages_key="messages")
    (tmp_path / "all.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}{% endfor %}"
    )
    chat = ChatConfig(template=str(tmp_path / "all.jinja"), question_suffix="\nBox it.")
    assert texts(tokenizer, records, chat) == [
        "<system>Be brief.<user>2+2?\nBox it.",
        "<user>2+|2?\nBox it.|",
        "<user>2+2?\nBox it.<assistant>a call<tool>4",
    ]
    assert records[0].messages[-1]["content"] == "2+2?"
    questions = load(write(tmp_path / "q.jsonl", RECORDS[:1]))
    assert texts(tokenizer, questions, ChatConfig(template="none", question_suffix=" Box it.")) == ["0+1? Box it."]


def test_a_template_of_ones_own_with_its_variables_and_tools(tokenizer, tmp_path):
    (tmp_path / "mine.jinja").write_text(THINKING)
    rows = [{"question": "a?", "answer": 1, "tools": [TOOL, TOOL]}, {"question": "b?", "answer": 1, "tools": []}]
    records = load(write(tmp_path / "d.jsonl", rows), tools_key="tools")
    chat = ChatConfig(template=str(tmp_path / "mine.jinja"), template_kwargs={"enable_thinking": False})
    assert texts(tokenizer, records, chat) == ["user:a?;2 tools;<no>", "user:b?;<no>"]


def test_a_template_by_its_name(tokenizer, tmp_path):
    tokenizer.chat_template = {"default": "D{{ messages[0].content }}", "rag": "R{{ messages[0].content }}"}
    records = load(write(tmp_path / "d.jsonl", RECORDS[:1]))
    assert texts(tokenizer, records) == ["D0+1?"]
    assert texts(tokenizer, records, ChatConfig(template="rag")) == ["R0+1?"]
    with pytest.raises(
        ConfigError, match=r"chat.template=rga: no template of .*\n.*give one of default, rag, or the path"
    ):
        texts(tokenizer, records, ChatConfig(template="rga"))


def test_plain_text_without_any_template(tokenizer, tmp_path):
    tokenizer.chat_template = None
    records = load(write(tmp_path / "d.jsonl", RECORDS[:2]))
    assert texts(tokenizer, records, ChatConfig(template="none")) == ["0+1?", "1+1?"]
    with pytest.raises(ModelError, match=r"has no chat template\n.*chat.template to a file, or to none for plain text"):
        texts(tokenizer, records)


def test_what_the_template_does_not_read_is_refused(tokenizer, tmp_path):
    records = load(write(tmp_path / "d.jsonl", [RECORDS[0] | {"tools": [TOOL]}]), tools_key="tools")
    with pytest.raises(ConfigError, match=r"chat.template_kwargs.enable_thinking: the chat template of .* has no such"):
        texts(tokenizer, records, ChatConfig(template_kwargs={"enable_thinking": False}))
    with pytest.raises(ModelError, match=r"d.jsonl:1: there are tools, and the chat template of .* writes none"):
        texts(tokenizer, records)


def test_a_chat_that_the_template_refuses_is_named_by_its_line_or_skipped(tokenizer, tmp_path):
    (tmp_path / "strict.jinja").write_text(STRICT)
    chat = ChatConfig(template=str(tmp_path / "strict.jinja"))
    rows = [{"messages": CHAT[1:], "answer": 4}, {"messages": CHAT, "answer": 4}]
    records = load(write(tmp_path / "d.jsonl", rows), messages_key="messages")
    with pytest.raises(DataError, match=r"d.jsonl:2: the chat template of .* can't write this chat: one message only"):
        texts(tokenizer, records, chat)
    bad = BadRecords(DatasetConfig(path="", bad_records="skip"))
    assert texts(tokenizer, records, chat, bad=bad) == ["2+2?"]
    assert bad.count == 1
    with pytest.raises(DataError, match="the chat template can't write one of the 1 prompts"):
        texts(tokenizer, records[1:], chat, bad=bad)
