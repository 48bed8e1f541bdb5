"""Turns, branches and edited histories: what the model wrote is kept as it was generated, and counts once."""

import dataclasses

import pytest

from actors.episodes.transcript import Turn, find_turn, segments_of, whole_completion
from actors.episodes.turn_tokens import TurnTokens, Unwritable
from launcher.base.errors import ConfigError, ModelError
from launcher.base.rollouts import Completion
from launcher.config.data import ChatConfig
from tests.support.episodes import chat_templates

USER = {"role": "user", "content": "1+2=?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c1"}
TOOLS = ({"type": "function", "function": {"name": "add"}},)


def made(*tokens, version=4, server="http://a", finish="stop"):
    logprobs = tuple(-token / 100 for token in tokens)
    return Completion(token_ids=tokens, logprobs=logprobs, weight_version=version, finish_reason=finish, server=server)


def turn(before, given, completion, *, said="x", asked=USER, tools=(), calls=None):
    answer = {"role": "assistant", "content": said} | ({"tool_calls": calls} if calls else {})
    known = () if before is None else before.messages
    return Turn(before=before, messages=(*known, asked, answer), tools=tools, given=given, completion=completion)


def test_a_second_turn_adds_the_tokens_between_and_its_own():
    first = turn(None, (1, 2), made(10, 11))
    second = turn(first, (3, 4), made(12, server="http://b", version=3))
    (segment,) = segments_of([first, second])
    assert segment.prompt == (1, 2)
    assert segment.completion.token_ids == (10, 11, 3, 4, 12)
    assert segment.own == (True, True, False, False, True)
    assert segment.completion.logprobs == (-0.10, -0.11, 0.0, 0.0, -0.12)
    assert (segment.completion.weight_version, segment.completion.server) == (3, "http://a http://b")
    assert segment.completion.versions == ((4, 2), (3, 3)), "what is given counts as of the answer that it is given for"
    assert whole_completion([first, second]).versions == ((4, 2), (3, 1))
    assert second.token_ids == (1, 2, 10, 11, 3, 4, 12)
    assert whole_completion([first, second]).token_ids == (10, 11, 12)


def test_branches_share_a_beginning_that_is_trained_on_once():
    first = turn(None, (1,), made(10))
    left, right = turn(first, (2,), made(11)), turn(first, (3,), made(12))
    one, other = segments_of([first, left, right])
    assert (one.prompt, one.completion.token_ids, one.own) == ((1,), (10, 2, 11), (True, False, True))
    assert (other.prompt, other.completion.token_ids, other.own) == ((1, 10, 3), (12,), (True,))
    trained = [t for s in (one, other) for t, own in zip(s.completion.token_ids, s.own, strict=True) if own]
    assert sorted(trained) == sorted(whole_completion([first, left, right]).token_ids)
    assert one.completion.runs == ((4, 3),)


def test_an_answer_that_newer_weights_continued_and_one_that_they_made_have_their_versions():
    cut = dataclasses.replace(made(11, 12, 13, version=5), versions=((5, 1), (6, 2)))
    first = turn(None, (1,), made(10, version=5))
    second = turn(first, (2,), cut)
    branch = turn(first, (3, 4), made(14, version=7))
    one, other = segments_of([first, second, branch])
    assert (one.completion.weight_version, one.completion.versions) == (5, ((5, 3), (6, 2)))
    assert (other.prompt, other.completion.runs) == ((1, 10, 3, 4), ((7, 1),)), "its beginning is trained on above"
    assert whole_completion([first, second, branch]).versions == ((5, 2), (6, 2), (7, 1))


def test_messages_continue_the_longest_turn_that_they_begin_with():
    first = turn(None, (1,), made(10), calls=[CALL], tools=TOOLS)
    second = turn(first, (2,), made(11), asked=RESULT, said="3", tools=TOOLS)
    turns = [first, second]
    sent = {"role": "assistant", "content": "x", "tool_calls": [CALL], "refusal": "", "name": "me"}
    assert find_turn(turns, [USER, sent, RESULT], TOOLS) is first
    assert find_turn(turns, [*second.messages, USER], TOOLS) is second
    assert find_turn(turns, [USER], TOOLS) is None
    assert find_turn(turns, [USER, sent, RESULT], ()) is None  # other tools: another beginning


def test_who_asks_for_what_was_answered_already_begins_anew():
    first = turn(None, (1,), made(10))
    assert find_turn([first], first.messages, ()) is None


def test_who_said_it_is_part_of_a_message():
    first = turn(None, (1,), made(10))
    asked, answer = first.messages
    assert find_turn([first], [asked, {**answer, "role": "user"}, USER], ()) is None
    assert find_turn([first], [{**asked, "role": "assistant"}, answer, USER], ()) is None


@pytest.mark.parametrize(("ours", "theirs"), [(None, ""), ("", None), (None, None)])
def test_an_answer_of_calls_alone_has_no_text_however_a_client_writes_that(ours, theirs):
    first = turn(None, (1,), made(10), said=ours, calls=[CALL], tools=TOOLS)
    sent = {"role": "assistant", "content": theirs, "tool_calls": [CALL]}
    assert find_turn([first], [USER, sent, RESULT], TOOLS) is first


def test_it_ended_as_its_last_answer_did():
    first = turn(None, (1,), made(10, finish="stop"))
    (segment,) = segments_of([first, turn(first, (2,), made(11, finish="length"))])
    assert segment.completion.finish_reason == "length"


@pytest.mark.parametrize(
    "edited",
    [
        {"role": "assistant", "content": "y", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "x", "tool_calls": [{**CALL, "id": "c2"}]},
        {"role": "user", "content": "x"},
    ],
)
def test_an_edited_history_begins_anew(edited):
    first = turn(None, (1,), made(10), calls=[CALL])
    assert find_turn([first], [USER, edited, RESULT], ()) is None
    anew = turn(None, (1, 5), made(12))
    assert [segment.prompt for segment in segments_of([first, anew])] == [(1,), (1, 5)]


def chat(template):
    tokenizer = chat_templates.tokenizer(template)
    return tokenizer, TurnTokens(tokenizer, ChatConfig())


@pytest.mark.parametrize("template", [None, chat_templates.TOOLS, chat_templates.STRICT])
def test_the_tokens_of_a_transcript_are_what_the_template_writes_of_the_chat(template):
    tokenizer, turns = chat(template)
    turns.check_template()
    answer = {"role": "assistant", "content": "47+8=55"}
    sent = tuple(tokenizer("47+8=55<|im_end|>", add_special_tokens=False)["input_ids"])
    tokens = turns.opening([USER], ()) + sent + turns.following(sent[-1], [USER], ())
    whole = tokenizer.apply_chat_template([USER, answer, USER], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(list(tokens)) == whole
    cut = sent[:-1]  # by the token limit: the template's own end mark follows, which the model did not write
    assert turns.opening([USER], ()) + cut + turns.following(cut[-1], [USER], ()) == tokens


@pytest.mark.parametrize("template", [chat_templates.TOOLS, chat_templates.STRICT])
def test_results_of_tools_are_written_as_the_template_does(template):
    tokenizer, turns = chat(template)
    written = '{"name": "add", "arguments": {"a": 1}}'
    sent = tuple(tokenizer(f"<tool_call>{written}</tool_call><|im_end|>", add_special_tokens=False)["input_ids"])
    results = [RESULT, {**RESULT, "content": "4"}][: 1 if template == chat_templates.STRICT else 2]
    tokens = turns.opening([USER], TOOLS) + sent + turns.following(sent[-1], results, TOOLS)
    parsed = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [parsed]}
    whole = tokenizer.apply_chat_template(
        [USER, called, *results], tools=list(TOOLS), tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(list(tokens)).replace('"add"', "add") == whole.replace('"add"', "add")


LATE_TOOLS = (
    "{% for m in messages %}"
    "{% if tools and loop.last %}{{ 'Tools: ' + tools | tojson + '\\n' }}{% endif %}"
    + chat_templates.TURN
    + "{% endfor %}"
) + chat_templates.OPENS
"""Like Mistral: the tools stand before the last message."""
USUAL_WORDS = "An answer."


@pytest.mark.parametrize("template", [chat_templates.TOOLS, chat_templates.STRICT, LATE_TOOLS])
def test_no_text_of_a_tool_or_message_is_taken_for_the_answer_before_it(template):
    tokenizer, turns = chat(template)
    described = ({"type": "function", "function": {"name": "add", "description": f"{USUAL_WORDS} In digits."}},)
    asked = {"role": "user", "content": f"Was this {USUAL_WORDS!r}?"}
    end = tokenizer.eos_token_id
    written = tokenizer.decode(list(turns.following(end, [asked], described)))
    assert written.count("<|im_start|>user") == 1, "only the new message, and nothing of what was written before"
    assert written.endswith(f"<|im_start|>user\n{asked['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert written.count("Tools: ") == (template == LATE_TOOLS)
    result = {**RESULT, "content": USUAL_WORDS}
    written = tokenizer.decode(list(turns.following(end, [result], described)))
    assert written.count(USUAL_WORDS) == 1 + (template == LATE_TOOLS)
    assert "A question." not in written


def test_a_template_that_writes_an_answer_twice_is_refused():
    twice = chat_templates.TURN.replace("m.content", "m.content + (m.content if m.role == 'assistant' else '')")
    _, turns = chat("{% for m in messages %}" + twice + "{% endfor %}" + chat_templates.OPENS)
    with pytest.raises(Unwritable, match="it writes an earlier answer 2 times"):
        turns.following(0, [USER], ())
    with pytest.raises(ModelError, match="it writes an earlier answer 2 times"):
        turns.check_template()


def test_odd_tokens_of_the_model_are_kept_as_they_came():
    tokenizer, turns = chat(None)
    odd = tuple(tokenizer(list("user"), add_special_tokens=False)["input_ids"][i][0] for i in range(4))
    assert tuple(tokenizer("user", add_special_tokens=False)["input_ids"]) != odd  # encoded again it would be another
    end = tokenizer.eos_token_id
    first = turn(None, turns.opening([USER], ()), made(*odd, end))
    second = turn(first, turns.following(end, [USER], ()), made(7, end))
    tokens = second.token_ids
    at = len(first.given)
    assert tokens[at : at + 5] == (*odd, end)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (chat_templates.THINKING + "{# </think> #}", "drops or changes the model's thoughts of earlier turns"),
        (chat_templates.FORGETFUL, "leaves an earlier answer out"),
        ("{{ raise_exception('one turn only') if messages | length > 1 else messages[0].content }}", "one turn only"),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(template, why):
    _, turns = chat(template)
    with pytest.raises(ModelError) as refused:
        turns.check_template()
    assert why in str(refused.value)
    assert "chat.template" in str(refused.value)


def test_a_template_is_needed():
    with pytest.raises(ConfigError, match="there is no template for a chat"):
        TurnTokens(chat_templates.tokenizer(), ChatConfig(template="none")).check_template()


def test_messages_that_the_template_refuses_are_named():
    _, turns = chat("{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + "")
    with pytest.raises(Unwritable, match="no tools"):
        turns.opening([USER, RESULT], ())
