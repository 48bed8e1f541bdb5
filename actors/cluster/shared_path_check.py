"""Checks, before anything is started, that cluster.fileroot is the same folder on every node.

    driver   writes  .same_place.<nonce>/driver            (0700, and the run's keys, in cluster.fileroot)
    a task on each node reads that, the keys, and writes   .same_place.<nonce>/<node>
    driver   reads each of them, and removes the folder

The message names the node's address and what is wrong: the path is missing, is another folder, can't be written or is
another user's there; or this program is not installed. The check also finds out whether all nodes share one
memory-backed folder, as only nodes of one machine do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from actors.cluster.node_answers import NodeAnswer, ask_each_node
from launcher.base.errors import LauncherError, StorageError, UsageError
from launcher.base.private_folders import make_private
from launcher.checkpoints.in_memory_checkpoints import MEMORY_BACKED
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths

SEEN_S = 15.0
"""For a node's file to appear here: network file systems may cache for long that a file does not exist."""
HINT = (
    "set cluster.fileroot to an absolute path on a file system that every node has mounted there, "
    "and on which this user may write"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSeen:
    """What one node found. `problem` is empty where nothing is wrong."""

    problem: str
    shares_memory: bool


def check_shared_path(paths: RunPaths) -> bool:
    """Raises UsageError naming every node that doesn't see the same folder.

    Returns whether all nodes share this one's memory-backed folder: then they are one machine.
    """
    nonce = secrets.token_hex(8)
    folder, in_memory = paths.fileroot / f".same_place.{nonce}", MEMORY_BACKED / f".same_place.{nonce}"
    try:
        _put_driver(folder, in_memory, nonce)
        seen = _ask_all(folder, in_memory, nonce, paths)
        problems = [f"{address}: {one.problem}" for address, one in seen.items() if one.problem]
        if len(problems) == 1:
            raise StorageError(f"node {problems[0]}", HINT)
        if problems:
            raise StorageError("".join([f"{len(problems)} nodes:", *(f"\n  node {line}" for line in problems)]), HINT)
        return all(one.shares_memory for one in seen.values())
    finally:
        for made in (folder, in_memory):
            shutil.rmtree(made, ignore_errors=True)


def _put_driver(folder: Path, in_memory: Path, nonce: str) -> None:
    try:
        make_private(folder)
        (folder / "driver").write_text(nonce)
    except OSError as error:
        raise StorageError(f"cluster.fileroot={folder.parent}: {error.strerror or error}", HINT) from error
    with contextlib.suppress(OSError):
        make_private(in_memory)


def _ask_all(folder: Path, in_memory: Path, nonce: str, paths: RunPaths) -> dict[str, PathSeen]:
    answers = ask_each_node(_look_at_path, lambda node: (folder, in_memory, nonce, node, paths.keys))
    return {one.address: _understood(one, folder / one.node, nonce) for one in answers}


def _understood(one: NodeAnswer, written: Path, nonce: str) -> PathSeen:
    if one.problem:
        return _bad(one.problem)
    seen: PathSeen = one.answer
    if seen.problem:
        return seen
    return seen if _is_seen(written, nonce) else _bad(f"what it wrote to {written.parent.parent} is not there here")


def _is_seen(file: Path, nonce: str) -> bool:
    give_up_at = time.monotonic() + SEEN_S
    while True:
        with contextlib.suppress(OSError):
            list(file.parent.iterdir())  # has a network file system ask its server again
            if file.read_text() == nonce:
                return True
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.2)


def _bad(problem: str) -> PathSeen:
    return PathSeen(problem=problem, shares_memory=False)


@ray.remote
def _look_at_path(folder: Path, in_memory: Path, nonce: str, node: str, keys: Path) -> PathSeen:
    """On one node."""
    return look_at_path(folder, in_memory, nonce, node, keys)


def look_at_path(folder: Path, in_memory: Path, nonce: str, node: str, keys: Path) -> PathSeen:
    root = folder.parent
    if not root.is_dir():
        return _bad(f"cluster.fileroot={root} is not there")
    try:
        if not _is_seen(folder / "driver", nonce):
            return _bad(f"cluster.fileroot={root} is another place there: what the driver wrote is not in it")
        (folder / node).write_text(nonce)
        ServerKeys.read(keys)
    except PermissionError as error:
        return _bad(f"cluster.fileroot={root}: {error.strerror} (user id {os.geteuid()} there)")
    except OSError as error:
        return _bad(f"cluster.fileroot={root} can't be written: {error.strerror or error}")
    except (UsageError, LauncherError) as error:
        return _bad(error.message)
    return PathSeen(problem="", shares_memory=in_memory.is_dir())
