"""Passes an operator's request to a running run: in a file that its Coordinator reads, not in a message.

    {fileroot}/keys/…/request.json     0600 in a folder that is its owner's alone (launcher/run_files/run_keys.py)

A state that is wanted, not an order: a Coordinator that was killed, or that is slow, reads the same as its predecessor,
and asking twice changes nothing. It needs no Ray, no token and no open port: who may write there may command the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import os
import stat
from dataclasses import dataclass

from launcher.base.durable import replace_file
from launcher.base.errors import StorageError
from launcher.base.private_folders import OTHERS
from launcher.run_files.run_paths import RunPaths

FILE = "request.json"


class ControlRequest(enum.StrEnum):
    RUN = "run"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEntry:
    """`by`: who asked, and from which machine. `servers`: how many there are to be, None: as many as there are. `at`:
    unix seconds of the wish, which may be repeated."""

    wish: ControlRequest
    by: str
    reason: str = ""
    servers: int | None = None
    at: float = 0.0

    @property
    def description(self) -> str:
        return f"asked by {self.by}{f': {self.reason}' if self.reason else ''}"


def ask(paths: RunPaths, request: RequestEntry) -> None:
    """Raises StorageError where the run's folder of keys is not there, or not this user's."""
    content = json.dumps(dataclasses.asdict(request)).encode()
    try:
        replace_file(paths.keys / FILE, content)
        (paths.keys / FILE).chmod(0o600)
    except OSError as error:
        raise StorageError(
            f"{paths.keys} can't be written: {error.strerror or error}", "only the user who started the run may ask it"
        ) from error


def asks_to_stop(paths: RunPaths) -> bool:
    """For whoever waits before the run has a Coordinator. A file that can't be read now asks for nothing new."""
    with contextlib.suppress(StorageError):
        request = wanted(paths)
        return request is not None and request.wish is ControlRequest.STOP
    return False


def wanted(paths: RunPaths) -> RequestEntry | None:
    """None where nothing was asked, or not by this user. Raises StorageError where the file is there and its disk does
    not give it now: that is not the same, and a pause must not end by it."""
    try:
        descriptor = os.open(paths.keys / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & OTHERS & ~0o044:
                return None
            data = json.load(file)
        wish, by, reason = ControlRequest(data["wish"]), str(data["by"]), str(data["reason"])
        servers = data.get("servers")
        return RequestEntry(
            wish=wish,
            by=by,
            reason=reason,
            servers=None if servers is None else max(1, int(servers)),
            at=float(data.get("at", 0.0)),
        )
    except (ValueError, KeyError, TypeError):
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # not there, or a link
            return None
        what = f"{paths.keys / FILE} can't be read: {error.strerror or error}"
        raise StorageError(what, "what was asked before holds on; look at its disk") from error


def forget(paths: RunPaths) -> None:
    """Starting a run cancels what was asked before."""
    with contextlib.suppress(FileNotFoundError):
        (paths.keys / FILE).unlink()
