"""What the door takes and answers in OpenAI's form, and what it refuses by name."""

import json

import pytest

from actors.episodes.chat_request import BadRequest, ChatAnswer, ChatRequest

ASKED = [{"role": "user", "content": "1+2=?"}]
TOOL = {"type": "function", "function": {"name": "add", "description": None}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def answer(text, *, has_tools=True, finish="stop"):
    return ChatAnswer.of(text, finish, has_tools=has_tools, prompt_tokens=3, tokens=2)


def test_a_request_is_read_as_clients_send_it():
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2=?"}]
    body = {"messages": [{"role": "user", "content": parts, "name": None}], "tools": [TOOL], "model": "x"}
    request = ChatRequest.of({**body, "temperature": 0.3, "n": 1, "max_completion_tokens": 7, "stream": True})
    assert list(request.messages) == ASKED
    assert list(request.tools) == [{"type": "function", "function": {"name": "add"}}]
    assert (request.max_tokens, request.is_streamed, request.model) == (7, True, "x")
    assert ChatRequest.of({**body, "tool_choice": "none"}).tools == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "no JSON object"),
        ({"messages": ASKED, "n": 2}, "n=2 is not possible in an episode"),
        ({"messages": ASKED, "stop": ["####"]}, "stop="),
        ({"messages": ASKED, "tool_choice": "required"}, "tool_choice='required'"),
        ({"messages": ASKED, "response_format": {"type": "json_object"}}, "response_format="),
        ({"messages": ASKED, "max_tokens": 0.5}, "max_tokens=0.5 is no number of tokens"),
        ({"messages": []}, "a list of messages"),
        ({}, "a list of messages"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "3"}]}, "nothing for the model to answer"),
        ({"messages": [*ASKED, {"role": "system", "content": "Be."}]}, "a system message comes first, and once"),
        ({"messages": [{"role": "robot", "content": "3"}]}, "has the role 'robot'"),
        ({"messages": ASKED, "tools": "add"}, "tools are a list of JSON schemas"),
    ],
)
def test_what_can_t_be_answered_is_refused_by_name(body, said):
    with pytest.raises(BadRequest, match=said):
        ChatRequest.of(body)


def test_calls_of_tools_are_read_from_the_text():
    found = answer(f"I add. {CALL}{CALL}")
    assert (found.message["content"], found.finish_reason) == ("I add.", "tool_calls")
    one, other = found.message["tool_calls"]
    assert one["id"] != other["id"]
    assert one["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert answer(CALL, has_tools=False).message == {"role": "assistant", "content": CALL}
    assert answer(CALL, finish="length").finish_reason == "length"


@pytest.mark.parametrize("broken", ["{", '{"arguments": {}}', "[]", "7", '{"name": "add", "arguments": {}'])
def test_a_broken_call_is_text(broken):
    text = f"{CALL}<tool_call>{broken}</tool_call>"
    assert answer(text).message == {"role": "assistant", "content": text}
    assert answer(text).finish_reason == "stop"


def test_a_stream_says_what_the_whole_answer_does():
    found = answer(CALL)
    first, last = found.events("x")
    whole = found.body("x")
    delta = first["choices"][0]["delta"]
    assert [{k: v for k, v in call.items() if k != "index"} for call in delta["tool_calls"]] == (
        whole["choices"][0]["message"]["tool_calls"]
    )
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    json.dumps([first, last, whole])
