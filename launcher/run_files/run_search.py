"""Which runs there are below a fileroot, and which of them is meant by some names: every tool asks here."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.base.wording import some_of
from launcher.run_files.run_paths import RunPaths

FLAGS = ("--user", "--experiment-name", "--trial-name")
Names = tuple[str, str, str]
"""User, experiment and trial; the user is "" in AReaL's older layout, which has none."""


def runs_below(fileroot: Path) -> list[RunPaths]:
    """Each that has a folder of logs; without those in folders that this user may not look into."""
    folders = sorted(path for path in fileroot.glob("logs/*/*/*/") if not path.name.startswith("."))
    return [paths for folder in folders if (paths := RunPaths.of_logs(folder)) is not None]


def names_in(paths: RunPaths) -> Names:
    return paths.user, paths.experiment_name, paths.trial_name


def choose_names(there: Sequence[Names], wanted: tuple[str, str | None, str | None], below: Path) -> Names:
    """Of those that are there the one that is meant: `wanted` has the names that were given. Raises UsageError: which
    one is wrong, or missing, with what there is instead."""
    left = there
    for at, (flag, name) in enumerate(zip(FLAGS, wanted, strict=True)):
        fitting = [one for one in left if not name or one[at] == name or (not one[at] and _is_named(one, wanted))]
        if not fitting:
            assert name is not None, "without a name all fit"
            what = f"{flag} {name}: there is no such folder in {below}, {_instead(left, at, name)}"
            raise UsageError(what, _hint(there, wanted))
        left = fitting
    if len({one[1:] for one in left}) == 1:  # in both layouts, the user's own comes first
        return next((one for one in left if one[0]), left[0])
    flag = next(flag for at, flag in enumerate(FLAGS) if not wanted[at] and len({one[at] for one in left}) > 1)
    known = some_of([_flags(one, wanted[0]) for one in there])
    raise UsageError(f"{flag} is not given", f"in {below} there are {known}")


def _is_named(one: Names, wanted: tuple[str, str | None, str | None]) -> bool:
    """By experiment and trial, as far as these are given."""
    return all(name in (None, "", mine) for name, mine in zip(wanted[1:], one[1:], strict=True))


def _instead(left: Sequence[Names], at: int, name: str) -> str:
    known = sorted({one[at] for one in left} - {""})
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"which holds {some_of([*close, *(one for one in known if one not in close)])}"


def _hint(there: Sequence[Names], wanted: tuple[str, str | None, str | None]) -> str:
    elsewhere = [one for one in there if one[1:] == wanted[1:]]
    known = some_of(["/".join(filter(None, one)) for one in there])
    return f"it is there as {'/'.join(filter(None, elsewhere[0]))}" if elsewhere else f"there: {known}"


def _flags(names: Names, user: str) -> str:
    """Those that name it on this user's command line."""
    given = [(flag, name) for flag, name in zip(FLAGS, names, strict=True) if name and (flag, name) != (FLAGS[0], user)]
    return " ".join(f"{flag} {shlex.quote(name)}" for flag, name in given)
