"""Where a function of the user's raised, and its traceback in the log.

Both are known only in the process in which the function runs; what leaves it is one line.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

MOST_TRACEBACKS = 20
"""Of a process: a message with the completion in it is new each time, and would fill the disk."""
CALLERS = {str(Path(__file__).with_name(f"{one}_functions.py")) for one in ("reward", "episode")}
CALLERS.add(str(Path(__file__).with_name("reward_import.py")))
PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
PYTHON = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})

_written: set[str] | None = None


def write_tracebacks() -> None:
    """From now on, once for each message."""
    global _written  # noqa: PLW0603 - one for a process, as its standard error is
    _written = set()


def place_of(error: BaseException) -> str:
    """` (my_rewards.py:7)`: the deepest line of the user's own files; else of an installed package; "" for none."""
    files = [one for one in traceback.extract_tb(error.__traceback__) if one.filename not in CALLERS]
    installed = [one for one in files if one.filename.startswith(PACKAGES)]
    own = [one for one in files if not one.filename.startswith(("<", *PYTHON, *PACKAGES))] or installed
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def log_traceback(error: BaseException, message: str) -> None:
    """Where tracebacks are wanted, if this is the first error with that message."""
    if _written is None or message in _written or len(_written) >= MOST_TRACEBACKS:
        return
    _written.add(message)
    print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
