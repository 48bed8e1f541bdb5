"""How a reward function is found by its name, and what it may ask for.

Write a function, plain or `async`, in any importable module, and name it `module:function` in `reward.fn`; several are
joined by `+`. It gets those of these arguments that its signature names:

    completion     what the model wrote                 prompt_id       the prompt's stable id
    answer         the record's, of any type            token_ids       of the completion
    record         the full record                      finish_reason   "stop" or "length"
    group          the texts of all completions of the prompt

It answers a finite number, a dict of parts (whose sum is the reward; one that names a whole reward beside other keys is
refused, as other projects mean that key alone), or None: no answer, and the completion is made
anew. If a completion can't be scored, raise: it then has no reward, which is not the same as 0. The function runs in a
process of its own (`actors/reward/reward_worker.py`), which is killed when one completion takes longer than
`reward.timeout`; what it prints goes to the log.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from actors.reward.other_arguments import ours_for, would_be_lacking
from actors.reward.raised_errors import place_of
from launcher.base.errors import RewardImportError

RewardFn = Callable[..., object]
Fn = TypeVar("Fn", bound=RewardFn)

KEY = "reward.fn"
ALWAYS = ("completion", "answer", "prompt_id", "record")
ARGUMENTS = (*ALWAYS, "token_ids", "finish_reason", "group")


def checked_by(check: Callable[[object], str]) -> Callable[[Fn], Fn]:
    """Declares which answers of a data set a reward function can compare with: `check(answer)` returns the problem, or
    "". They are checked before a run begins."""

    def declare(fn: Fn) -> Fn:
        fn.check_answer = check  # type: ignore[attr-defined]
        return fn

    return declare


def function_names(setting: str) -> list[str]:
    """`a:f+b:g` names two."""
    return [name.strip() for name in setting.split("+")]


def load_reward_fn(path: str) -> RewardFn:
    """One of the functions that `reward.fn` names. Raises RewardImportError, which says what is wrong with it."""
    fn = import_named(path, KEY)
    check_signature(path, fn, KEY, ARGUMENTS)
    return fn  # type: ignore[no-any-return]


def import_named(path: str, key: str) -> Any:
    """What the setting `key` names as module:name. Raises RewardImportError."""
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise RewardImportError(
            f"{key}={path!r} does not name a function", f"write {key}=module:function, e.g. actors.reward:gsm8k_reward"
        )
    named = getattr(_import(path, module_name, key), name, None)
    if named is None:
        raise RewardImportError(
            f"{key}={path!r}: module {module_name!r} has no {name!r}", f"define {name} there, or change {key}"
        )
    return named


def _import(path: str, module_name: str, key: str) -> object:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything while imported
        hint = f"python -c 'import {module_name}' must work in the folder that the run is started from"
        if isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name):
            if module_name.endswith(".py"):
                hint = f"a module is named without the ending of its file: {path.replace('.py:', ':')}"
            raise RewardImportError(f"{key}={path!r}: there is no module {error.name!r}", hint) from error
        raise RewardImportError(
            f"{key}={path!r}: importing {module_name!r} raised {type(error).__name__}: {error}{place_of(error)}", hint
        ) from error


def check_signature(path: str, fn: object, key: str, arguments: Sequence[str]) -> None:
    """Raises RewardImportError where it can't be called with some of `arguments` by their names, which names all of the
    others that it asks for."""
    wanted = f"a function of any of {', '.join(arguments)}"
    if not callable(fn):
        raise RewardImportError(f"{key}={path!r} is a {type(fn).__name__}, not a function", wanted)
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # written in C without a signature: the first call will show it
        return
    if inspect.isclass(fn):  # calling it would make an object of it, which is no reward
        raise RewardImportError(
            f"{key}={path!r} is a class, and a call of it makes an object, not a reward",
            f"name an instance with __call__: `scorer = {fn.__name__}(…)` in that module, and its name in {key}",
        )
    kinds = {one.kind for one in parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    if inspect.Parameter.VAR_POSITIONAL in kinds and not takes_all and not parameters.keys() & set(arguments):
        what = f"{key}={path!r} takes its arguments by their places (*), and they are given by name"
        raise RewardImportError(what, f"it must be {wanted}")
    foreign = _foreign(parameters, arguments, key)
    try:
        given = {name: None for name in arguments if takes_all or name in parameters}
        inspect.signature(fn).bind(**given)
    except TypeError as error:
        raise RewardImportError(
            f"{key}={path!r} can't be called: {_missing(parameters, given) or error}", f"{foreign}it must be {wanted}"
        ) from error
    if foreign:
        what = f"{key}={path!r} asks for what it would never be given"
        raise RewardImportError(what, f"{foreign}it must be {wanted}")


def is_async(fn: object) -> bool:
    """An object's `__call__` may be async, too."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _missing(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, object]) -> str:
    """All that have no value, in place of the first; "" where something else is wrong."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(one.kind is inspect.Parameter.POSITIONAL_ONLY for one in parameters.values()):
        return ""
    lacks = [
        name
        for name, one in parameters.items()
        if one.kind in named and one.default is inspect.Parameter.empty and name not in given
    ]
    if len(lacks) == 1:
        return f"missing a required argument: {lacks[0]!r}"
    return f"missing required arguments: {', '.join(map(repr, lacks))}" if lacks else ""


def _foreign(parameters: Mapping[str, inspect.Parameter], arguments: Sequence[str], key: str) -> str:
    """What to put in the place of each argument of another project; "" where there is none. One that has a default is
    the function's own option, unless it is empty and another project is known to give it: it would stay so."""
    if key != KEY:
        return ""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    others = [
        name
        for name, one in parameters.items()
        if name not in arguments
        and one.kind not in variadic
        and (one.default is inspect.Parameter.empty or would_be_lacking(name, one.default))
    ]
    return f"replace {'; '.join(f'{name} → {ours_for(name)}' for name in others)}; " if others else ""
