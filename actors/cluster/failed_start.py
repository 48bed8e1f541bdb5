"""Why a local Ray did not start, by what it raised and what its own processes wrote, and what to do about each cause.

Ray itself says "timed out" for all of them. The machine is called busy only where nothing else was found, and the try
took long.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from launcher.base.wording import in_one_line

REMEDIES = (
    (r"AF_UNIX path|[Ff]ile ?name too long", "set TMPDIR (or RAY_TMPDIR) to a folder with a short path: TMPDIR=/tmp"),
    (r"No space left on device|ENOSPC|[Dd]isk quota exceeded", "make room where TMPDIR is, or set it to another disk"),
    (r"Read-only file system", "set TMPDIR to a folder that may be written"),
    (
        r"Permission denied|Operation not permitted",
        "set TMPDIR to a folder of yours that may be written and executed in",
    ),
    (r"[Aa]ddress already in use", "a port is taken: end what listens there (an old `ray start`?), or leave it out"),
    (
        r"can't start new thread|[Rr]esource temporarily unavailable|pthread_create|EAGAIN",
        "raise the limit of processes and threads (ulimit -u 8192; docker: --pids-limit=-1)",
    ),
    (r"Too many open files", "raise the limit of open files: ulimit -n 65536"),
    (r"Cannot allocate memory|bad_alloc|MemoryError", "free some memory, or raise the limit of the container"),
    (
        r"ModuleNotFoundError|ImportError|partially initialized module|has no attribute",
        "a file or folder hides a package from Ray: look at PYTHONPATH, PYTHONHOME and the names in this folder",
    ),
    (r"undefined symbol|GLIBC|cannot open shared object", "unset LD_PRELOAD and LD_LIBRARY_PATH, or install again"),
)
"""What is found in the error or in a log → what to do; the first match."""
ERROR = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*|.*(?: [EFC] \d+ .*| ERROR .*|Check failed.*| what\(\): .*)", re.M
)
"""A line in which a process of Ray says that it failed: Python's last line of a traceback, or glog's E and F."""
LOGS = "session_latest/logs"
LONGEST = 200


def error_in_logs(folder: Path | None, since: float) -> str:
    """The last error of Ray's processes that started after `since` (unix seconds), and its file; "" of none."""
    found = [(text, file) for file, text in _logs(folder, since) if ERROR.search(text)]
    known = [one for one in found if any(re.search(pattern, one[0]) for pattern, _ in REMEDIES)]
    for text, file in known or found:
        lines = [line.group(0) for line in ERROR.finditer(text)]
        telling = [line for line in lines if any(re.search(pattern, line) for pattern, _ in REMEDIES)]
        return f"{file}: {in_one_line((telling or lines)[-1], longest=LONGEST)}"
    return ""


def remedy_of_start(error: BaseException, folder: Path | None, since: float, *, took_long: bool) -> str:
    """What to do. `since`: unix seconds, when it was first tried."""
    seen = error_in_logs(folder, since)
    for pattern, remedy in REMEDIES:
        if re.search(pattern, f"{error}\n{seen}"):
            return f"{seen}; {remedy}" if seen else remedy
    if seen:
        return f"Ray's own log says: {seen}"
    if took_long:
        return "is this machine overloaded? Ray was tried again for minutes, and its logs have no error"
    return "" if folder is None else f"Ray's logs are in {folder / LOGS}"


def _logs(folder: Path | None, since: float) -> list[tuple[Path, str]]:
    if folder is None:
        return []
    found = []
    with contextlib.suppress(OSError):  # no session was begun
        for file in sorted((folder / LOGS).resolve(strict=True).iterdir()):
            with contextlib.suppress(OSError):
                if file.suffix in {".log", ".out", ".err"} and file.stat().st_mtime >= since:
                    found.append((file, file.read_text(errors="replace")))
    return found
