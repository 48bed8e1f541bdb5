"""How a reward function is found by its name.

Write a function with this signature in any importable module, and name it `module:function` in `reward.fn`:

    def my_reward(*, completion: str, answer: str, prompt_id: str, record: Mapping[str, object]) -> float: ...

`completion` is what the model wrote, `answer` the record's, `prompt_id` the prompt's stable id, `record` the full
record as the data set has it. Answer a finite number. If a completion can't be scored, raise: the completion
then has no reward, which is not the same as 0. The function runs in a process of its own
(`actors/reward/reward_worker.py`), which is killed when one completion takes longer than `reward.timeout`; what it
prints goes to the log.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from launcher.base.errors import RewardImportError

RewardFn = Callable[..., object]


def load_reward_fn(path: str) -> RewardFn:
    """The function that `reward.fn` names. Raises RewardImportError, whose message says what is wrong with it."""
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
    wanted = "def fn(*, completion, answer, prompt_id, record) -> float"
    if not callable(fn):
        raise RewardImportError(f"reward.fn={path!r} is a {type(fn).__name__}, not a function", wanted)
    if inspect.iscoroutinefunction(fn):
        raise RewardImportError(f"reward.fn={path!r} is an async function", f"an ordinary one is wanted: {wanted}")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # written in C without a signature: the first call will show it
        return
    try:
        signature.bind(completion="", answer="", prompt_id="", record={})
    except TypeError as error:
        message = f"reward.fn={path!r} can't be called: {error}"
        raise RewardImportError(message, f"its signature must be {wanted}") from error
