"""How a reward function is found by its name, and what it may ask for.

Write a function, plain or `async`, in any importable module, and name it `module:function` in `reward.fn`; several are
joined by `+`. It gets those of these arguments that its signature names:

    completion     what the model wrote                 prompt_id       the prompt's stable id
    answer         the record's, of any type            token_ids       of the completion
    record         the full record                      finish_reason   "stop" or "length"
    group          the texts of all completions of the prompt

It answers a finite number, a dict of parts (whose sum is the reward), or None: no answer, and the completion is made
anew. If a completion can't be scored, raise: it then has no reward, which is not the same as 0. The function runs in a
process of its own (`actors/reward/reward_worker.py`), which is killed when one completion takes longer than
`reward.timeout`; what it prints goes to the log.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TypeVar

from launcher.base.errors import RewardImportError

RewardFn = Callable[..., object]
Fn = TypeVar("Fn", bound=RewardFn)

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
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise RewardImportError(
            f"reward.fn={path!r} does not name a function",
            "write reward.fn=module:function, e.g. actors.reward:gsm8k_reward",
        )
    module = _import(path, module_name)
    fn = getattr(module, name, None)
    if fn is None:
        raise RewardImportError(
            f"reward.fn={path!r}: module {module_name!r} has no {name!r}", f"define {name} there, or change reward.fn"
        )
    _check_signature(path, fn)
    return fn  # type: ignore[no-any-return]


def _import(path: str, module_name: str) -> object:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything while imported
        hint = f"python -c 'import {module_name}' must work in the folder that the run is started from"
        if isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name):
            raise RewardImportError(f"reward.fn={path!r}: there is no module {error.name!r}", hint) from error
        raise RewardImportError(
            f"reward.fn={path!r}: importing {module_name!r} raised {type(error).__name__}: {error}", hint
        ) from error


def _check_signature(path: str, fn: object) -> None:
    wanted = f"a function of any of {', '.join(ARGUMENTS)}"
    if not callable(fn):
        raise RewardImportError(f"reward.fn={path!r} is a {type(fn).__name__}, not a function", wanted)
    try:
        signature = inspect.signature(fn)
    except ValueError:  # written in C without a signature: the first call will show it
        return
    try:
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
        signature.bind(**{name: None for name in ARGUMENTS if takes_all or name in signature.parameters})
    except TypeError as error:
        message = f"reward.fn={path!r} can't be called: {error}"
        raise RewardImportError(message, f"it must be {wanted}") from error
