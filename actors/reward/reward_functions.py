"""Calls the reward functions of a run, in the process that is theirs: arguments by name, parts, weights, async ones.

    completion ─► each function, with the arguments that its signature names ─► a number, a dict of parts, or None
                                                                               ─► sum of weight × (sum of parts)

None means that there is no answer, which is not a reward of 0. Of a group, `async` functions are awaited side by side.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.reward.other_arguments import is_whole_reward
from actors.reward.raised_errors import log_traceback, place_of
from actors.reward.reward_import import ALWAYS, ARGUMENTS, RewardFn, function_names, is_async, load_reward_fn

MAX_ERROR_CHARS = 500

Item = Mapping[str, Any]
"""One completion, as all the arguments that a function may ask for."""


class NoReward(Exception):
    """A function answered what is no reward; the message names it."""


class NoAnswer(NoReward):
    """It answered None."""


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """One of the functions, its weight, and the arguments it takes."""

    name: str
    fn: RewardFn
    weight: float
    arguments: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        try:
            parameters = inspect.signature(self.fn).parameters.values()
        except ValueError:  # written in C without a signature
            taken: tuple[str, ...] = ALWAYS
        else:
            takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
            taken = ARGUMENTS if takes_all else tuple(one.name for one in parameters if one.name in ARGUMENTS)
        object.__setattr__(self, "arguments", taken)

    def call(self, item: Item) -> object:
        given = {name: item[name] for name in self.arguments}
        if "record" in given:
            given["record"] = dict(given["record"])  # its own, whatever the function does to it
        return self.fn(**given)


class RewardFunctions:
    """Those that `reward.fn` names. Raises RewardImportError where one can't be used."""

    def __init__(self, setting: str, weights: Sequence[float], timeout: float) -> None:
        paths = function_names(setting)
        short = [path.partition(":")[2] for path in paths]
        names = short if len(set(short)) == len(short) else paths
        self._functions = [
            NamedFunction(name, load_reward_fn(path), weight)
            for name, path, weight in zip(names, paths, weights or [1.0] * len(paths), strict=True)
        ]
        self._timeout = timeout
        self.is_async = any(is_async(one.fn) for one in self._functions)
        self._loop = asyncio.new_event_loop() if self.is_async else None

    def score(self, items: Sequence[Item]) -> Iterator[dict[str, object]]:
        """One message for each item, in order, as soon as it is known. Never raises for what a function does."""
        if self._loop is None:
            yield from (self._score(item) for item in items)
            return
        tasks = [self._loop.create_task(self._score_async(item)) for item in items]
        yield from (self._loop.run_until_complete(task) for task in tasks)

    def find_bad_answers(self, answers: Sequence[object]) -> dict[int, str]:
        """By its place, why an answer is none that the functions can compare with. Only they know: a function says so
        by an attribute `check_answer`, which is a function of the answer that returns the problem, or ""."""
        checks = [check for one in self._functions if (check := getattr(one.fn, "check_answer", None)) is not None]
        found = {place: check(answer) for check in checks for place, answer in enumerate(answers)}
        return {place: str(problem) for place, problem in found.items() if problem}

    def _score(self, item: Item) -> dict[str, object]:
        try:
            return self._total([one.call(item) for one in self._functions])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a function raises is that completion's alone
            return failure_of(error)

    async def _score_async(self, item: Item) -> dict[str, object]:
        try:
            async with asyncio.timeout(self._timeout):
                return self._total(await asyncio.gather(*(_awaited(one, item) for one in self._functions)))
        except TimeoutError:
            return {"error": f"took longer than reward.timeout={self._timeout:g} s", "late": True}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in _score
            return failure_of(error)

    def _total(self, answers: Sequence[object]) -> dict[str, object]:
        parts: dict[str, float] = {}
        total = 0.0
        for one, answer in zip(self._functions, answers, strict=True):
            for part, value in parts_of(one.name, answer).items():
                total += one.weight * value
                several = len(self._functions) > 1
                parts["/".join(name for name in (one.name if several else "", part) if name)] = value
        if not math.isfinite(total):
            raise NoReward(f"the rewards of {', '.join(one.name for one in self._functions)} add up to {total}")
        return {"value": total} | ({"parts": parts} if list(parts) != [""] else {})


async def _awaited(one: NamedFunction, item: Item) -> object:
    answer = one.call(item)
    return await answer if isinstance(answer, Awaitable) else answer


def parts_of(name: str, answer: object) -> dict[str, float]:
    """A dict's parts by their names; a number is one part without a name."""
    if answer is None:
        raise NoAnswer(f"{name} gave no answer (None)")
    if not isinstance(answer, Mapping):
        return {"": _number(name, answer)}
    if not answer:
        raise NoReward(f"{name} answered an empty dict")
    _refuse_two_readings(name, answer)
    missing = [part for part, value in answer.items() if value is None]
    if missing:
        raise NoAnswer(f"{name} gave no answer for {missing[0]} (None)")
    return {str(part): _number(f"{name}, part {part},", value) for part, value in answer.items()}


def _refuse_two_readings(name: str, answer: Mapping[Any, object]) -> None:
    """Elsewhere the key `score` is the reward, and the others are figures beside it; here all are parts of the reward.
    Raises NoReward."""
    whole = next((key for key in answer if is_whole_reward(key)), None)
    if whole is None or len(answer) == 1:
        return
    others = ", ".join(str(key) for key in answer if key != whole)
    try:
        added = f"is {sum(_number(name, value) for value in answer.values()):g}"
    except NoReward:
        added = "can't be had, as not all are numbers"
    raise NoReward(
        f"{name} answered a dict with {whole} beside {others:.100}: if {whole} is the whole reward, it is "
        f"{answer[whole]!r:.50}; if each is a part, their sum {added}. Return the number alone, or rename {whole}"
    )


def _number(name: str, value: object) -> float:
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():  # a scalar of NumPy or torch
        value = item()
    if not isinstance(value, numbers.Real):
        raise NoReward(f"{name} answered {value!r:.100}, a {type(value).__name__} and not a number{_of_many(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise NoReward(f"{name} answered {number}, which is not finite")
    return number


def _of_many(value: object) -> str:
    """Other projects' functions score many completions in one call, or answer figures beside the reward."""
    return "; it answers one number, for one completion" if isinstance(value, list | tuple) else ""


def failure_of(error: BaseException) -> dict[str, object]:
    """The message for a completion whose function raised. The traceback is written to the log (raised_errors)."""
    if not isinstance(error, NoReward):
        text, place = f"{type(error).__name__}: {error}", place_of(error)
        log_traceback(error, text)
        return {"error": text[: MAX_ERROR_CHARS - len(place)] + place}
    return {"error": str(error)[:MAX_ERROR_CHARS], "unanswered" if isinstance(error, NoAnswer) else "no_reward": True}
