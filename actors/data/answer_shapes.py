"""A record's own answer, as a model could give it: what a reward function must tell from a wrong one.

Each function reads its own form, which isn't known here: so each answer is written in the forms that are usual. The
wrong one differs in the last number, or is another record's answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from actors.data.answers import final_answers

WHOLE_NUMBER = re.compile(r"\d[\d,.]*(?=\D*$)")
LAST_NUMBER = re.compile(r"\d+(?=\D*$)")
MOST_DIGITS = 1000
"""At the end of a number, that are raised: Python refuses to convert more than 4,300 (sys.set_int_max_str_digits)."""
LONGEST = 2000
"""Characters. A longer answer is a text such as unit tests, which no model is to repeat."""
ANSWERS = ("ground_truth", "answer", "target", "label", "solution", "expected_answer", "gold", "reference", "value")
"""Keys of an answer that is a dict (verl: reward_model.ground_truth), in the order in which they are looked for."""
SHAPES: Mapping[str, str] = {
    "as it stands": "{whole}",
    "#### …": "#### {short}",
    r"\boxed{…}": "\\boxed{{{short}}}",
    "<answer>…</answer>": "<think>\nA thought.\n</think>\n<answer>\n{short}\n</answer>",
    "<answer>…</answer> in one line": "<answer>{short}</answer>",
    r"<answer>\boxed{…}</answer>": "<think>A thought.</think><answer>\\boxed{{{short}}}</answer>",
    "Answer: …": "Answer: {short}",
    "The answer is …": "The answer is {short}.",
    "JSON": '{{"answer": {quoted}}}',
    "the answer alone": "{short}",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A right and a wrong answer in one shape."""

    right: str
    wrong: str


def text_of(answer: object) -> str | None:
    """The answer as a text; None where there is none that a model could be expected to write."""
    if isinstance(answer, Mapping):
        known = [answer[key] for key in ANSWERS if answer.get(key) is not None]
        return text_of(known[0] if known else next(iter(answer.values()), None) if len(answer) == 1 else None)
    if isinstance(answer, list | tuple):
        return text_of(answer[0]) if answer else None
    if isinstance(answer, bool) or answer is None:
        return None if answer is None else str(answer)
    text = str(answer) if isinstance(answer, int | float) else answer
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
        return None
    if text.lstrip().startswith(("{", "[")):
        return _inside_json(text)
    return text


def _inside_json(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text_of(value) if isinstance(value, Mapping | list) else text


def pairs_of(answer: object, others: Sequence[object]) -> dict[str, Pair]:
    """By the shape's name; empty where no answer can be derived, or no wrong one. `others`: of other records."""
    whole = text_of(answer)
    if whole is None:
        return {}
    short = next(final_answers(whole), whole).strip()
    wrong_whole, wrong_short = with_another_number(whole), with_another_number(short)
    if wrong_whole is None or wrong_short is None:
        other = next(_different(short, others), None)
        if other is None:
            return {}
        wrong_whole = wrong_short = other
    return {
        name: Pair(_written(shape, whole, short), _written(shape, wrong_whole, wrong_short))
        for name, shape in SHAPES.items()
    }


def _written(shape: str, whole: str, short: str) -> str:
    return shape.format(whole=whole, short=short, quoted=json.dumps(short, ensure_ascii=False))


def _different(short: str, others: Sequence[object]) -> Iterator[str]:
    for other in others:
        text = text_of(other)
        if text is not None and (last := next(final_answers(text), text).strip()).lower() != short.lower():
            yield last


def with_another_number(answer: str) -> str | None:
    """The answer with its last number raised by one; None where it has none. Where all of the last MOST_DIGITS of a
    longer number are 9, it gets a digit more: another number, too."""
    found = LAST_NUMBER.search(answer)
    if found is None:
        return None
    raised_from = max(found.start(), found.end() - MOST_DIGITS)
    raised = str(int(answer[raised_from : found.end()]) + 1)
    if raised_from > found.start():
        raised = raised.zfill(MOST_DIGITS)  # else the zeros before it would be lost, and digits with them
    return f"{answer[:raised_from]}{raised}{answer[found.end() :]}"


def with_more_digits(answer: str) -> str | None:
    """The answer with a digit before its last number: 512 for 12, a wrong one that ends with the right one. None where
    it has none."""
    found = WHOLE_NUMBER.search(answer)
    return None if found is None else f"{answer[: found.start()]}5{answer[found.start() :]}"
