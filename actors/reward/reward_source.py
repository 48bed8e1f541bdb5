"""Is the reward function the one whose known answers were learnt? One that was changed on purpose between two attempts
scores them otherwise, as a broken one does: no score tells the two apart, but whether its code changed is seen."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.reward.canaries import keep, read_kept
from actors.reward.reward_import import function_names

OF = "learnt of "
CHANGED = (
    "reward.fn is not as it was when that was learnt: if it is meant to score otherwise, stop the run, remove "
    "canaries.json and recorded_answers.json from its logs, and give the same command"
)


def doubt_of(fn: str, weights: Sequence[float], own: Mapping[str, str], *, kept_in: Path) -> str:
    """What is to be said beside a known answer that is scored wrongly; "" where the function is as it was, or that is
    not known. `own`: further functions, by their data sets. The first time, what it is now is kept in `kept_in`, beside
    what was learnt of it."""
    now, kept = OF + _digest(fn, weights, own), read_kept(kept_in)
    if not (before := [name for name in kept if name.startswith(OF)]):
        if kept:
            keep(kept_in, kept | {now: 0.0})
        return ""
    return "" if now in before else CHANGED


def _digest(fn: str, weights: Sequence[float], own: Mapping[str, str]) -> str:
    """Of the settings and of the files that they name; not of what those import."""
    digest = hashlib.sha256(repr((fn, list(weights), sorted(own.items()))).encode())
    for name in [one for setting in (fn, *own.values()) for one in function_names(setting)]:
        digest.update(_source(name.partition(":")[0]))
    return digest.hexdigest()[:16]


def _source(module: str) -> bytes:
    """Found as an import would find it, without the import; empty where it is no file of Python's."""
    path = module.replace(".", "/")
    places = (Path(entry or ".") / name for entry in sys.path for name in (f"{path}/__init__.py", f"{path}.py"))
    file = next((place for place in places if place.is_file()), None)
    try:
        return b"" if file is None else file.read_bytes()
    except OSError:
        return b""
