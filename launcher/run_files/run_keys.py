"""Makes and reads the secrets of one run: the keys of its SGLang servers, the token of its own Ray cluster.

    {fileroot}/keys/{user}/{experiment_name}/{trial_name}/     0700
        servers.json     the API key and the admin key     0600
        api_key     the API key alone, as curl and Prometheus read it     0600
        ray_token        of a cluster that the run starts     0600
        watch_token      of the run's page (watch.port)     0600
        webhook          the URL that gets the alerts     0600

In files, since an environment is inherited by every child and a command line is read by everybody; beside `logs/`, not
in it, since logs are shown to people and copied. They are made once for a run: each attempt finds them, and so does a
tool of the same user. To have others, remove the folder between two attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from launcher.base.durable import make_folder
from launcher.base.errors import StorageError, UsageError
from launcher.base.private_folders import OTHERS, make_private

SERVERS, API_KEY, RAY_TOKEN, WEBHOOK, WATCH = "servers.json", "api_key", "ray_token", "webhook", "watch_token"
ENVIRONMENT = "env:"
HIDDEN = "__hidden__"
"""In place of all that a URL has after its host, which may be a password."""
BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """`api` opens generation and questions, `admin` everything. Neither is in the `repr`, so in no log by accident."""

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def make(cls, folder: Path) -> Path:
        """The file of the run's keys, made where it isn't there. Raises StorageError."""
        keys = {"api": secrets.token_hex(BYTES), "admin": secrets.token_hex(BYTES)}
        path = _make(folder, SERVERS, json.dumps(keys))
        _make(folder, API_KEY, cls.read_file(path).api)
        return path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises StorageError where they aren't there, or aren't this user's alone."""
        return cls.read_file(folder / SERVERS)

    @classmethod
    def read_file(cls, path: Path) -> Self:
        """As `read`, where only the file is known."""
        try:
            data = json.loads(_read(path))
            keys = cls(api=str(data["api"]), admin=str(data["admin"]))
        except (ValueError, KeyError, TypeError) as error:  # not `from` it: its text may hold a key
            raise StorageError(f"{path} holds no keys: {type(error).__name__}", ANEW) from None
        if not keys.api or not keys.admin:
            raise StorageError(f"{path} holds an empty key, with which anybody could log in", ANEW)
        return keys


def make_ray_token(folder: Path) -> Path:
    """The file of the token of the run's own cluster. Raises StorageError."""
    return _make(folder, RAY_TOKEN, secrets.token_hex(BYTES))


def make_watch_token(folder: Path) -> Path:
    """The file of the token of the run's page. Raises StorageError."""
    return _make(folder, WATCH, secrets.token_hex(BYTES))


def read_watch_token(folder: Path) -> str:
    """Raises StorageError."""
    return _read(folder / WATCH)


def shown_webhook(given: str) -> str:
    """What of `alerts.webhook` may be printed and recorded: `env:NAME` as it is, of a URL its host."""
    url = urlsplit(given)
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}/{HIDDEN}" if url.scheme.startswith("http") else given


def webhook_url(given: str, folder: Path) -> str:
    """The URL that `alerts.webhook` means: itself, a variable's value, or what an earlier attempt kept.

    Raises UsageError: there is none of them.
    """
    name = given.removeprefix(ENVIRONMENT)
    is_variable = name != given
    url = os.environ.get(name, "") if is_variable else given
    if url.startswith("http") and url != shown_webhook(url):
        return url
    if not (is_variable and url) and (folder / WEBHOOK).exists():
        return read_webhook(folder)
    what = f"the environment variable {name} {'holds no URL' if url else 'is not set'}"
    raise UsageError(
        f"alerts.webhook={given}: {what if is_variable else 'only this of the URL was recorded, and its file is gone'}",
        f"export {name}=https://…, or give another alerts.webhook" if is_variable else "give the URL again",
    )


def keep_webhook(given: str, folder: Path) -> str:
    """Keep the URL with the run's keys; returns what may be shown. Raises UsageError, StorageError."""
    url = webhook_url(given, folder)
    if not _holds(folder / WEBHOOK, url):  # else it stays: it may be the only copy, and the disk may be full
        with contextlib.suppress(FileNotFoundError):
            (folder / WEBHOOK).unlink()
        _make(folder, WEBHOOK, url)
    return shown_webhook(given)


def _holds(path: Path, content: str) -> bool:
    try:
        return _read(path) == content
    except StorageError:
        return False


def read_webhook(folder: Path) -> str:
    """Raises StorageError."""
    return _read(folder / WEBHOOK)


ANEW = "end the run, remove the folder, and start the run again: new keys are made"


def _make(folder: Path, name: str, content: str) -> Path:
    """`content` in a file that appears complete and 0600, or what another process of the run has made before."""
    path = folder / name
    try:
        make_folder(folder.parent)
        make_private(folder)
        if not path.exists():
            descriptor, staged = tempfile.mkstemp(dir=folder, prefix=".")  # 0600, whatever the umask
            try:
                with os.fdopen(descriptor, "w") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                with contextlib.suppress(FileExistsError):  # made meanwhile; unlike a rename, a link replaces nothing
                    os.link(staged, path)
            finally:
                Path(staged).unlink()
    except OSError as error:
        raise StorageError(
            f"{path} can't be written: {error.strerror or error}", "give a folder of this user's, on a disk with room"
        ) from error
    _read(path)
    return path


def _read(path: Path) -> str:
    """A secret, if nobody but this user can have read or placed it. Raises StorageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StorageError(f"{path} is not there: the run's keys are made when it starts", "start the run") from error
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror}", "keys are their owner's alone") from error
    with os.fdopen(descriptor) as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or mode & OTHERS:
            raise StorageError(f"{path} is open to others (mode {mode:o}, owner {found.st_uid}): not used", ANEW)
        return file.read()
