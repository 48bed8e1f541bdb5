"""Final answers as GSM8K writes them: the text after `####`, or inside `\\boxed{}`.

Standard library only: the driver checks a data set with it before anything is started, and the reward function compares
with it. Plain numbers are parsed here, in microseconds; fractions and LaTeX are left to math-verify
(`actors/reward/gsm8k.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

MAX_ANSWER_CHARS = 200
"""No final answer is longer. A model that repeats one token until its limit must cost nothing to read."""

MARKERS_READ = 5
"""Only the last ones: a model that repeats `#### 1/0` must not cost seconds."""

_MARK = re.compile(r"####|\\f?boxed\s*\{")
_NUMBER = re.compile(r"([-+]?)\s*(\d[\d,]*(?:\.\d*)?|\.\d+)\s*%?")
_WRAPPED_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_DRESS = re.compile(r"\\[()\[\],;:! ]|\\(?:left|right)(?![A-Za-z])|\\?[$€£]|\{,\}|\^\s*\{?\\circ\}?")
_FRACTION_OR_LATEX = re.compile(r"\d\s*/\s*\d|\\[A-Za-z]+.*\d")
_UNIT = re.compile(r"(?<=[\d})%.])\s+[A-Za-z][A-Za-z .]*$")


def final_answers(text: str) -> Iterator[str]:
    """The marked answers of `text`, the last first.

    All are given, since a marker may mean something else: chat models write `#### Conclusion` as a heading
    after their `\\boxed{42}`.
    """
    for mark in reversed(list(_MARK.finditer(text))[-MARKERS_READ:]):
        rest = text[mark.end() : mark.end() + MAX_ANSWER_CHARS]
        answer = rest.lstrip().partition("\n")[0].strip() if mark.group() == "####" else _until_brace_closes(rest)
        if answer:
            yield answer


def _until_brace_closes(text: str) -> str:
    """Nothing where it does not: the token limit has cut the number off."""
    depth = 1
    for index, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return text[:index].strip()
    return ""


def bare(answer: str) -> str:
    """`answer` without decoration: currency and maths signs, `\\text{}`, emphasis, units, anything before an `=`."""
    text = _DRESS.sub("", _WRAPPED_WORDS.sub(r" \1 ", answer).replace("\\%", "%"))
    return _UNIT.sub("", text.rpartition("=")[2].strip(" \t*_`~≈:()")).rstrip(" .")


def plain_number(answer: str) -> Decimal | None:
    """The value of a plain number (`1,200`, `$18.00`, `-3.`, `50%`, `18 dollars`), or None where it is not one.

    A percent sign is dropped, as GSM8K's own answers drop it.
    """
    number = _NUMBER.fullmatch(bare(answer))
    return Decimal(number[1] + number[2].replace(",", "")) if number else None


def has_number(answer: str) -> bool:
    """Whether a data set's answer ends in one number, as far as can be found out without math-verify."""
    last = next(final_answers(answer), "")
    return plain_number(last) is not None or _FRACTION_OR_LATEX.search(last) is not None
