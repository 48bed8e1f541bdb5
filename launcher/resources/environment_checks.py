"""The check of the environment variables and folders under which Ray, or a server, does not start on this node.

Each is found before the start: afterwards Ray says only that its node timed out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.base.findings import Finding, Severity
from launcher.base.private_folders import parent_of_rays_folder
from launcher.resources.hardware import usable_cpus

VARIABLES = ("TMPDIR", "TEMP", "TMP")
"""As Python asks for them: the first that names a folder that may be written."""
OF_RAY_ALONE = "RAY_TMPDIR"
SOCKET_PATH = 107
"""Bytes of the path of a socket (AF_UNIX) on Linux."""
OF_RAY = len("/session_2026-11-27_12-43-20_123456_1234567/sockets/plasma_store")
"""Below Ray's folder; the last number is a process id."""
OF_A_SERVER = len("/sgl-0123456789ab/pymp-01234567/listener-01234567")
"""Below TMPDIR: the folder of a server's temporary files, and in it a socket of Python's multiprocessing."""


def check_temporary_folders() -> Iterator[Finding]:
    """Ray's folder, and that of the servers where it is another."""
    try:
        usual, of_ray = Path(tempfile.gettempdir()), parent_of_rays_folder()
    except FileNotFoundError as error:
        remedy = "set TMPDIR to a folder that is there, may be written and has room"
        yield Finding(subject="TMPDIR", text=str(error), level=Severity.BAD, hint=remedy)
        return
    named = {name: value for name in VARIABLES if (value := os.environ.get(name))}
    taken = next((name for name, value in named.items() if Path(value).resolve() == usual.resolve()), "")
    tried = [*named][: [*named].index(taken) + 1] if taken else [*named]
    relative = [name for name in (*tried, OF_RAY_ALONE) if not Path(os.environ.get(name) or "/").is_absolute()]
    if relative:
        yield from map(_relative, relative)
        return
    given = taken or "TMPDIR"
    for folder, name, below in (
        (of_ray, given if of_ray == usual else OF_RAY_ALONE, f"/grpo-ray-{os.geteuid()}/ray"),
        *([(usual, given, "")] if of_ray != usual else ()),
    ):
        longest = SOCKET_PATH - (len(below) + OF_RAY if below else OF_A_SERVER)
        yield _folder(name, folder, longest)


def _relative(name: str) -> Finding:
    """Ray's processes and the servers have working folders of their own."""
    seen = f"{name}={os.environ[name]} is a relative path: each process would take another folder"
    remedy = f"set {name} to an absolute path: {name}=/tmp"
    return Finding(subject=name, text=seen, level=Severity.BAD, hint=remedy)


def _folder(name: str, folder: Path, longest: int) -> Finding:
    """`longest`: bytes of its path."""
    length = len(os.fsencode(folder))
    if length > longest:
        seen = f"{folder} has {length} bytes: the path of a socket in it would be longer than {SOCKET_PATH}"
        remedy = f"set {name} to a folder with a path of at most {longest} bytes: {name}=/tmp"
        return Finding(subject=name, text=seen, level=Severity.BAD, hint=remedy)
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        remedy = f"set {name} to a folder that is there and may be written: {name}=/tmp"
        return Finding(subject=name, text=f"{folder} is no folder that may be written", level=Severity.BAD, hint=remedy)
    return Finding(subject=name, text=str(folder))


def check_cpus() -> Finding:
    count, limit = usable_cpus()
    return Finding(subject="CPUs", text=f"{count} ({limit})" if limit else f"{count}, no limit")
