"""The reward of GSM8K: 1 where the number that a completion ends in is the answer's, else 0.

What another reward function must look like is described in `actors/reward/reward_import.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from decimal import Decimal

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from actors.data.answers import bare, final_answers, has_number, plain_number
from actors.reward.reward_import import checked_by

# math-verify warns that its own limit is off. It has to be: it needs SIGALRM, and the worker has a limit already.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig()]
_NOT_A_NUMERAL = re.compile(  # arithmetic that is left to the verifier must not be rewarded, nor a list of guesses
    r"\d\s+\d|/.*/"  # two numbers (math-verify adds them up), two fractions
    r"|[^-\d\s.,/{}^\\A-Za-z]|(?<=[^\s{])\s*-"  # signs of operation; a minus only in front
    r"|\\(?!(?:[dt]?frac|sqrt|pi|times|cdot)(?![A-Za-z]))|(?<![\\A-Za-z])[A-Za-z]"  # other commands, words
    r"|\\(?:times|cdot)(?!\s*10\s*\^)|(?<!10)\s*\^|\^(?!\s*\{?\s*\d{1,2}\b)"  # but 1.5 \times 10^{3} is a number
)
_MIXED = re.compile(r"(\d)\s+(\d+)\s*/\s*(\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def answer_problem(answer: object) -> str:
    """Why GSM8K's rule can't be used with a record's answer; "" where it can."""
    if isinstance(answer, str) and has_number(answer):
        return ""
    said = answer[-60:] if isinstance(answer, str) else answer
    return f"the answer has no number after ####: {said!r:.100} (an answer must end in its number, as in: ... #### 42)"


@checked_by(answer_problem)
def gsm8k_reward(*, completion: str, answer: str, prompt_id: str, record: Mapping[str, object]) -> float:
    """1.0 where the last number that `completion` marks with `####` or `\\boxed{}` equals that of `answer`, else 0.0.

    Raises ValueError where `answer` has no such number.
    """
    expected = final_value(answer)
    if expected is None:
        raise ValueError(
            f"the answer of prompt {prompt_id} has no number after #### or in \\boxed{{}}: {answer[-60:]!r}"
        )
    given = final_value(completion)
    return float(given is not None and _equal(expected, given))


def final_value(text: str) -> Decimal | sympy.Expr | None:
    """The last marked number of `text`. A marker that is followed by no number is passed over."""
    for candidate in final_answers(text):
        plain = plain_number(candidate)
        value = plain if plain is not None else _numeral(candidate)
        if value is not None:
            return value
    return None


def _numeral(answer: str) -> sympy.Expr | None:
    """A number that needs more than digits: a fraction, a root, LaTeX. Not a sum or a product: those are no answers."""
    text = _THOUSANDS.sub("", _MIXED.sub(r"\1\\frac{\2}{\3}", bare(answer)))
    if not text or _NOT_A_NUMERAL.search(text):
        return None
    found = parse(f"\\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    numbers = [value for value in found if isinstance(value, sympy.Expr) and value.is_number and value.is_real]
    return numbers[0] if numbers else None


def _equal(expected: Decimal | sympy.Expr, given: Decimal | sympy.Expr) -> bool:
    if isinstance(expected, Decimal) and isinstance(given, Decimal):
        return expected == given
    return bool(verify(_symbolic(expected), _symbolic(given), timeout_seconds=None))


def _symbolic(value: Decimal | sympy.Expr) -> sympy.Expr:
    return sympy.Rational(str(value)) if isinstance(value, Decimal) else value
