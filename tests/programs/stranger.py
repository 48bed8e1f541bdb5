"""What another account of the same machine tries: `python -m tests.programs.stranger`, with a list of steps on standard
input.

A step is `{"attack": name, "as_owner": bool, …arguments}` (JSON). Steps as the owner come first; before the first other
one the process becomes nobody, for good. It prints one line of JSON for each: `got_through`, and what it `saw`.

The owner's step does the same with the key, the token or the rights: an attack that fails for everybody proves nothing.
It also imports what the attack needs, which nobody may not be able to read.
"""

import contextlib
import encodings.idna  # noqa: F401 - urllib wants it at the first request
import fcntl
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

from launcher.base.errors import LauncherError
from launcher.run_files.run_paths import RunLock, RunPaths

NOBODY = 65534
LARGEST = 64 * 2**20


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.environ.update(HOME="/nonexistent", USER="nobody", LOGNAME="nobody")


def http(url: str, body: dict | None = None, key: str = "") -> tuple[bool, str]:
    """Through is any answer that isn't a refusal of the asker."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return True, str(answer.status)
    except urllib.error.HTTPError as error:
        return error.code not in {401, 403}, str(error.code)
    except OSError as error:
        return False, repr(error)


def actor_call(address: str, name: str, namespace: str, token: str = "") -> tuple[bool, str]:
    """Through is an answer of a named actor."""
    import ray

    _hold_token(token)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        return True, str(ray.get(ray.get_actor(name).__ray_ready__.remote(), timeout=60))
    except Exception as error:  # noqa: BLE001 - whatever keeps a stranger out
        return False, f"{type(error).__name__}: {error}"[:400]
    finally:
        ray.shutdown()


def cluster_state(address: str, token: str = "") -> tuple[bool, str]:
    """Through is an answer of Ray's control service, which can start jobs and actors."""
    from ray._raylet import GcsClient

    _hold_token(token)
    try:
        client = GcsClient(address=address)
        client.internal_kv_put(b"stranger", b"was here", True, namespace=b"stranger", timeout=20)
        return True, str(client.internal_kv_get(b"stranger", namespace=b"stranger", timeout=20))
    except Exception as error:  # noqa: BLE001 - whatever keeps a stranger out
        return False, f"{type(error).__name__}: {error}"[:400]


def _hold_token(token: str) -> None:
    """This one, or none at all, as a client with `RAY_AUTH_MODE=disabled` has."""
    from ray._raylet import AuthenticationTokenLoader, Config

    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)
    os.environ["RAY_AUTH_MODE"] = "token" if token else "disabled"
    if token:
        os.environ["RAY_AUTH_TOKEN"] = token
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def unix_sockets(folder: str) -> tuple[bool, str]:
    """Through is one that takes the connection."""
    opened = []
    for path in ("raylet", "plasma_store"):
        with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
            line.connect(f"{folder}/sockets/{path}")
            opened.append(path)
    return bool(opened), " ".join(opened)


def find_in_processes(needles: list[str]) -> tuple[bool, str]:
    """In the command, environment and memory map names of every process that lets itself be read."""
    hits, read = [], 0
    for entry in Path("/proc").iterdir():
        for part in ("cmdline", "environ", "comm", "maps"):
            with contextlib.suppress(OSError):
                text = (entry / part).read_bytes() if entry.name.isdigit() else b""
                read += bool(text)
                hits += [f"{entry.name}/{part}" for needle in needles if needle.encode() in text]
    return bool(hits), f"{len(hits)} of {read}: {' '.join(hits[:3])}"


def find_in_files(folders: list[str], needles: list[str]) -> tuple[bool, str]:
    """In every file below the folders that lets itself be read."""
    hits, read = [], 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for path in (Path(parent) / name for name in names):
                with contextlib.suppress(OSError):
                    if path.is_file() and path.stat().st_size < LARGEST:
                        text = path.read_bytes()
                        read += 1
                        hits += [str(path) for needle in needles if needle.encode() in text]
    return bool(hits), f"{len(hits)} of {read}: {' '.join(hits[:3])}"


def write(folders: list[str]) -> tuple[bool, str]:
    """Through is any file or folder below that can be written to, replaced, linked away or added to."""
    done = []
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for path in [Path(parent) / ".stranger", *(Path(parent) / name for name in names)]:
                with contextlib.suppress(OSError):
                    path.open("ab").close()
                    done.append(str(path))
            with contextlib.suppress(OSError):
                (Path(parent) / "link").symlink_to("/etc")
                done.append(f"{parent}/link")
            with contextlib.suppress(OSError):
                Path(parent).rename(f"{parent}.moved")
                done.append(f"{parent}.moved")
    return bool(done), " ".join(done[:3])


def lock(path: str) -> tuple[bool, str]:
    """Take the run's lock, which would keep it from ever starting again."""
    try:
        with Path(path).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True, "locked"
    except BlockingIOError:
        return True, "opened"
    except OSError as error:
        return False, repr(error)


def start_a_run(fileroot: str, experiment: str, trial: str, user: str) -> tuple[bool, str]:
    """Another run under the names of this one."""
    paths = RunPaths(fileroot=Path(fileroot), user=user, experiment_name=experiment, trial_name=trial)
    try:
        paths.prepare()
        RunLock(paths).release()
    except LauncherError as error:
        return False, error.message
    return True, "it has the lock"


ATTACKS = {
    attack.__name__: attack
    for attack in (
        *(http, actor_call, cluster_state, unix_sockets, find_in_processes, find_in_files),
        *(write, lock, start_a_run),
    )
}


def main() -> None:
    is_nobody = False
    for step in json.load(sys.stdin):
        if not step.pop("as_owner", False) and not is_nobody:
            become_nobody()
            is_nobody = True
        got_through, saw = ATTACKS[step.pop("attack")](**step)
        print(json.dumps({"got_through": got_through, "saw": saw}), flush=True)
    os._exit(0)  # Ray's own exit handlers want files that are root's


if __name__ == "__main__":
    main()
