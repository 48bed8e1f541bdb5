"""How every tool ends: with its exit code and at most one message, whatever ended it."""

from __future__ import annotations

import errno
import json
import math
import sys
from collections.abc import Callable, Mapping

from launcher.base.errors import LauncherError
from launcher.reporting.terminal_text import as_far_as_it_is_read, speak_anywhere, takes_all_letters

DONE, WRONG, INTERRUPTED = 0, 2, 130

_ROOM, _RIGHTS = "make room on its disk", "check that this user may read and write it"
_MISTYPED = dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "give the path of something that is there")
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE), _RIGHTS),
    **_MISTYPED,
}
"""Of what a disk or its rights refuse. A file that is not there is for the tool to foresee."""


def ended(run: Callable[[], int], *, refused: int = WRONG, unread: int = DONE) -> int:
    """The exit code of `run`; an error of ours ends in one message.

    `refused`: of an error that is not the command's. `unread`: where nobody read on before `run` had its own.
    """
    speak_anywhere()
    code = unread
    try:
        with as_far_as_it_is_read():
            code = run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        print(
            f"error: {error.filename or 'a file'}: {error.strerror or error}\n  → {REMEDIES[error.errno]}",
            file=sys.stderr,
        )
        return WRONG if error.errno in _MISTYPED else refused
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG if error.exit_code == WRONG else refused
    return code


def print_json(content: Mapping[str, object], *, indent: int = 2) -> None:
    """What is not a finite number is null: every reader takes that, few take NaN."""
    print(json.dumps(_finite(content), indent=indent, ensure_ascii=not takes_all_letters(), allow_nan=False))


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
    return value
