"""Do model, tokenizer and chat template agree on where an answer begins and ends? What contradicts itself is told.

A template whose turns end with a token that is no end token of the model lets each completion run into its limit: the
model has learned to write that token, and no server stops there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from actors.data.prompts import PromptWriter
from launcher.config.data import NO_TEMPLATE, ChatConfig

ANSWER = "An answer."
NEXT = "And another question."
USER = {"role": "user", "content": "A question."}


def find_end_notes(tokenizer: Any, chat: ChatConfig, folder: Path) -> Iterator[str]:
    """`folder`: of the model, whose configuration names its end tokens, as does the tokenizer. Nothing is said of a
    template that can't write an answer."""
    ends = end_tokens(tokenizer, folder)
    if not ends:
        yield (
            f"no end token is named by {folder} (config.json, generation_config.json, tokenizer_config.json): each "
            "completion is cut at gconfig.max_new_tokens; give its eos_token_id"
        )
    if chat.template == NO_TEMPLATE:
        return
    writer = PromptWriter(tokenizer, chat)
    try:
        asked, opened = (writer.text([USER], (), opens=opens) for opens in (False, True))
        whole = writer.text([USER, {"role": "assistant", "content": ANSWER}], (), opens=False)
    except (TemplateError, TypeError):
        return
    if ANSWER not in whole:
        return
    begins, _, tail = whole.rpartition(ANSWER)
    if opened == asked and begins.startswith(asked) and (lacks := begins[len(asked) :]).strip():
        yield (
            f"the chat template ignores add_generation_prompt: a prompt ends without {lacks!r}, with which it begins "
            "an answer; set chat.template to one that writes it"
        )
    after, between = (
        tokenizer(text, add_special_tokens=False)["input_ids"] if text else [] for text in (tail, _next_turn(writer))
    )
    if ends and not {*after, *between} & ends:
        yield _end_note(tokenizer, after, tail, ends)


def _next_turn(writer: PromptWriter) -> str:
    """What stands between an answer and the next question: some models end a turn with the mark that begins the next
    one. "" where the template can't write it."""
    more = {"role": "user", "content": NEXT}
    try:
        whole = writer.text([USER, {"role": "assistant", "content": ANSWER}, more], (), opens=False)
    except (TemplateError, TypeError):
        return ""
    return whole.rpartition(ANSWER)[2].partition(NEXT)[0] if NEXT in whole else ""


def _end_note(tokenizer: Any, after: Sequence[int], tail: str, ends: set[int]) -> str:
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in sorted(ends))
    mark = next((one for one in after if one in special_tokens(tokenizer)), None)
    if mark is None:
        return (
            f"the chat template ends an answer with {tail!r}, and with none of the model's end tokens {named}: "
            "completions may run into gconfig.max_new_tokens; set chat.template to one that ends with one of these"
        )
    return (
        f"the chat template ends an answer with {tokenizer.convert_ids_to_tokens(mark)} ({mark}), which is none of the "
        f"model's end tokens {named}: completions may run into gconfig.max_new_tokens; add {mark} to eos_token_id in "
        "generation_config.json of the model's folder"
    )


def end_tokens(tokenizer: Any, folder: Path) -> set[int]:
    """As the server has them: of both configurations and of the tokenizer."""
    found: list[object] = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        try:
            named = json.loads((folder / name).read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):  # not there; a damaged one is refused by others
            continue
        found += named if isinstance(named, list) else [named]
    return {one for one in found if type(one) is int}


def special_tokens(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}


def completion_texts(tokenizer: Any, completions: Sequence[Sequence[int]]) -> list[str]:
    """What a reward function gets: without the marks at the end, and with those before it. `42<|im_end|>5` without its
    mark would be 425."""
    special = special_tokens(tokenizer)
    texts: list[str] = tokenizer.batch_decode(
        [_without_end(completion, special) for completion in completions],
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )
    return texts


def _without_end(token_ids: Sequence[int], special: set[int]) -> list[int]:
    kept = list(token_ids)
    while kept and kept[-1] in special:
        kept.pop()
    return kept
