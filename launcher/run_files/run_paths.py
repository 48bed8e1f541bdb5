"""The paths of all files of a run (docs/files.md), and the lock that makes the run their only writer.

`RunPaths` only computes names: asking for a path never creates it, so that a check for something doesn't make it.
`prepare` and `RunLock` are used once, before anything else is started.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import hashlib
import json
import os
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launcher.base.durable import make_folder, replace_file
from launcher.base.errors import ConfigError, StillRunning, StorageError
from launcher.config.schema import RunConfig
from launcher.run_files.journal import read_events
from launcher.run_files.run_id import RUN_ID

MOST_ATTEMPTS = 2**31
"""A damaged line names more; the run would count on from there for ever."""
SIGNATURE_BYTES = 4096
LOOKS, LOOK_S = 20, 0.01
"""So often, and so long each time, a lock that is only looked at is waited for: a look takes far less."""
WITHOUT_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})


class _InLogs:
    """A path below the run's `logs`, as an attribute of RunPaths."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.logs / self._name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Every path of one run. `fileroot` is absolute: actors may work in another folder than the driver.

    Raises ConfigError for a name that can't be a folder's.
    """

    fileroot: Path
    user: str
    experiment_name: str
    trial_name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "fileroot", Path(self.fileroot).expanduser().absolute())
        for key in ("experiment_name", "trial_name", "user"):
            _check_folder_name(key, getattr(self, key))

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls(
            fileroot=Path(config.cluster.fileroot),
            user=login_name(),
            experiment_name=config.experiment_name,
            trial_name=config.trial_name,
        )

    @classmethod
    def of_logs(cls, folder: Path) -> Self | None:
        """Of the run whose `logs` that is; None where the path doesn't show it."""
        *root, logs, user, experiment, trial = ("", "", "", "", *folder.parts)
        if logs != "logs" or not any(root):
            return None
        return cls(fileroot=Path(*root), user=user, experiment_name=experiment, trial_name=trial)

    @property
    def title(self) -> str:
        """As people see it."""
        return f"{self.experiment_name} / {self.trial_name}"

    @property
    def checkpoints(self) -> Path:
        return self.fileroot / "checkpoints" / self.user / self.experiment_name / self.trial_name

    @property
    def default_checkpoints(self) -> Path:
        """The root of the CheckpointStore: AReaL's folder for the actor."""
        return self.checkpoints / "default"

    @property
    def restore(self) -> Path:
        """What a person has asked the run to go back to (launcher/checkpoints/restore_request.py)."""
        return self.checkpoints / "restore.json"

    @property
    def restore_taking(self) -> Path:
        """The same from when the run takes it until it has gone back."""
        return self.checkpoints / "restore.taking.json"

    @property
    def recover_checkpoint(self) -> Path:
        """Where earlier versions put a copy to go back to; it is refused."""
        return self.checkpoints / "recover_checkpoint"

    def kept_weights(self, attempt: int) -> Path:
        """What another project's trainer gave the servers last (actors/foreign/kept_weights.py)."""
        return self.checkpoints / "kept_weights" / f"attempt-{attempt}"

    @property
    def logs(self) -> Path:
        return self.fileroot / "logs" / self.user / self.experiment_name / self.trial_name

    @property
    def keys(self) -> Path:
        """0700, and never below `logs`, which are copied and shown to people (launcher/run_files/run_keys.py)."""
        return self.fileroot / "keys" / self.user / self.experiment_name / self.trial_name

    @property
    def namespace(self) -> str:
        """Of the run's actors, on a cluster that others use too: the same names below another root are another run."""
        root = hashlib.sha256(str(self.fileroot.resolve()).encode()).hexdigest()[:8]
        return f"grpo/{self.user}/{self.experiment_name}/{self.trial_name}/{root}"

    metrics = _InLogs("metrics.jsonl")
    events = _InLogs("events.jsonl")
    ledger = _InLogs("ledger.jsonl")
    memory = _InLogs("memory.jsonl")
    run_memory = _InLogs("memory.json")
    """What a Coordinator that takes over must know (launcher/run_files/run_memory.py)."""
    samples = _InLogs("samples.jsonl")
    trainer_log = _InLogs("trainer.log")
    config = _InLogs("config.yaml")
    report = _InLogs("report.html")
    summary = _InLogs("summary.txt")
    incidents = _InLogs("incidents")
    lock = _InLogs(".run.lock")
    now = _InLogs("now.json")
    settings = _InLogs(".settings.yaml")
    """Of the command that runs: each of its drivers begins with them, whatever a preset says by then."""
    again = _InLogs("again.json")
    scrape_targets = _InLogs("scrape_targets.json")
    attempt_counter = _InLogs(".attempt")
    run_id = _InLogs(RUN_ID)
    several_machines = _InLogs(".several_machines")
    """There once the run has been on more than one machine: what one's memory holds, others don't see."""

    def trainer_rank_log(self, rank: int) -> Path:
        """Of a rank beside the first, which writes the trainer's own."""
        return self.logs / f"trainer-rank-{rank}.log"

    def server_log(self, index: int) -> Path:
        return self.logs / f"llm_server-{index}.log"

    def incident(self, number: int) -> Path:
        return self.incidents / str(number)

    def prepare(self) -> None:
        """Create the folders that a run writes to. Raises StorageError naming cluster.fileroot."""
        for folder in (self.logs, self.default_checkpoints, self.keys.parent):
            _check_inside(folder, self.fileroot)
            try:
                make_folder(folder)
                _check_writable(folder)
            except OSError as error:
                raise _unusable(folder, error) from error


class RunLock:
    """The right to be this run: held from construction until `release`, or until the process ends in any way.

    An flock, so that a crash never leaves a stale one behind. `tool`: what holds it in place of a run, so that nobody
    takes it for one. Raises StorageError when another holds it.
    """

    def __init__(self, paths: RunPaths, *, tool: str = "") -> None:
        self._paths = paths
        self._tool = tool
        try:
            # Not inheritable: a server that outlives its driver must not keep the run locked.
            self._fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.fchmod(self._fd, 0o600)  # who may open it to read may lock it, and so keep the run from starting
        except OSError as error:
            raise _unusable(paths.lock, error) from error
        try:
            _lock(self._fd)
            self._sign()
        except BlockingIOError as error:
            tool, holder = _read_holder(self._fd)
            os.close(self._fd)
            is_held = f"is being worked on by {tool}" if tool else "is already running"
            another = "" if self._tool else ", or give this run another trial_name"
            kind = StorageError if tool else StillRunning
            raise kind(
                f"{paths.experiment_name}/{paths.trial_name} {is_held}: {holder} holds {paths.lock}",
                f"wait for it or end it{another}",
            ) from error
        except OSError as error:
            os.close(self._fd)
            if error.errno in WITHOUT_LOCKS:
                raise StorageError(
                    f"{paths.lock} can't be locked, as its file system has no locks: {error.strerror}",
                    "mount it with them (Lustre: -o flock), or set cluster.fileroot to a folder on another one",
                ) from error
            raise _unusable(paths.lock, error) from error

    def keep_over_exec(self) -> int:
        """This process is to become its run's keeper, which holds the lock by the descriptor that is returned."""
        os.set_inheritable(self._fd, True)
        return self._fd

    def _sign(self) -> None:
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "pid_namespace": pid_namespace(),
            "since": time.time(),
            "tool": self._tool,
        }
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(holder).encode(), 0)

    def next_attempt(self) -> int:
        return next_attempt(self._paths)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(fd: int) -> None:
    """Raises BlockingIOError where another holds it, at once. Who only looks (`is_lock_free`) shares it for a moment,
    which is waited for: else the look of a tool would keep a run from starting."""
    for _ in range(LOOKS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(LOOK_S)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def pid_namespace() -> str:
    """In which process numbers mean what they mean here; containers of a host have others. "" where /proc has none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def next_attempt(paths: RunPaths) -> int:
    """Count one more attempt of the run, 1 for the first. For the holder of its lock alone.

    Raises StorageError, JournalError.
    """
    attempt = last_attempt(paths) + 1
    try:
        replace_file(paths.attempt_counter, f"{attempt}\n".encode())
    except OSError as error:
        raise _unusable(paths.attempt_counter, error) from error
    return attempt


def last_attempt(paths: RunPaths) -> int:
    """How many there were. Raises StorageError, JournalError."""
    try:
        return int(paths.attempt_counter.read_text())
    except FileNotFoundError:  # the first, or the run was copied without the files whose names begin with a dot
        # not the fold, which begins above this package
        known = (event.get("attempt") for event in read_events(paths.events))
        return max((one for one in known if type(one) is int and one < MOST_ATTEMPTS), default=0)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{paths.attempt_counter} can't be read: {error}",
            "it holds the number of launches so far; write the `attempt` of the last line of events.jsonl into it",
        ) from error


@dataclass(frozen=True, slots=True)
class LockFile:
    """Which file it is, which a network file system may change at a new mount, and who has signed it."""

    device_and_inode: tuple[int, int]
    signature: bytes

    @classmethod
    def opened(cls, fd: int) -> Self:
        """Raises OSError."""
        return cls(_file_of(fd), os.pread(fd, SIGNATURE_BYTES, 0))

    def may_be(self, fd: int) -> bool:
        """Raises OSError."""
        return _file_of(fd) == self.device_and_inode or os.pread(fd, SIGNATURE_BYTES, 0) == self.signature


def _file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def lock_file(paths: RunPaths) -> LockFile | None:
    """The run's lock as it is now; None: there is none."""
    with contextlib.suppress(OSError), paths.lock.open("rb") as file:
        return LockFile.opened(file.fileno())
    return None


def held_by_another(paths: RunPaths, mine: LockFile | None) -> str:
    """Who holds another file than `mine` (`lock_file`, taken while this run held it) at its place, as after the folder
    of a running run was removed and the run started again; "" where nobody else is seen to, also for want of `mine`."""
    try:
        fd = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        if mine is not None and not mine.may_be(fd):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(fd)[1]
    except OSError:
        return ""
    finally:
        os.close(fd)
    return ""


def is_lock_free(paths: RunPaths) -> bool:
    """Nobody holds the run's lock now: who signed it last has ended, also where its process could not be seen from here
    (of a container). False where that can't be known."""
    try:
        with paths.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def login_name() -> str:
    """The user's name; `uid<n>` where the user id has none, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError up to Python 3.12, OSError from 3.13
        return f"uid{os.getuid()}"


def names_of(paths: RunPaths) -> str:
    """The flags that name a run to every tool, for a shell in any folder."""
    given = [("experiment-name", paths.experiment_name), ("trial-name", paths.trial_name), ("fileroot", paths.fileroot)]
    if paths.user != login_name():
        given.append(("user", paths.user))
    return " ".join(f"--{flag} {shlex.quote(str(value))}" for flag, value in given)


def _check_folder_name(key: str, name: str) -> None:
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise ConfigError(
            f"{key}={name!r} can't name a folder", f"set {key} to a name without '/', not empty, '.' or '..'"
        )


def _check_inside(folder: Path, root: Path) -> None:
    """A link on the way would have the run write, and later remove, what isn't its own."""
    for part in (folder, *folder.parents):
        if part == root:
            return
        if part.is_symlink():
            raise StorageError(
                f"{part} is a link to {part.readlink()}: a run writes below cluster.fileroot alone",
                "remove the link; to have runs elsewhere, set cluster.fileroot (which may be a link itself)",
            )


def _check_writable(folder: Path) -> None:
    """Write and remove a file: the only test that also knows of read-only mounts, quotas and full disks."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(b"\0" * 4096)
    finally:
        probe.unlink(missing_ok=True)


def _unusable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} can't be written: {error.strerror or error}",
        "set cluster.fileroot to a folder that this user may write to, on a disk with room",
    )


def _read_holder(fd: int) -> tuple[str, str]:
    """(the tool that it is, "" of a run; who and since when)"""
    try:
        holder = json.loads(os.pread(fd, SIGNATURE_BYTES, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(holder["since"]))
        return str(holder.get("tool", "")), f"pid {holder['pid']} on {holder['host']} since {since}"
    except (OSError, ValueError, KeyError, TypeError):  # between its flock and its signature
        return "", "a process that has not signed yet"
