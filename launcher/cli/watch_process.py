"""The watch page beside a run (`watch.port`): a process that its driver starts and ends, and that no run waits for.

It ends when its standard input does, so also where its driver is killed. It reads files and never talks to the driver.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable

from launcher.base.errors import StorageError
from launcher.run_files.run_keys import make_watch_token
from launcher.run_files.run_paths import RunPaths

END_S = 3.0


class WatchProcess:
    """From construction until `close`. What fails is said by `say`, from a thread of its own, and ends nothing."""

    def __init__(self, port: int, paths: RunPaths, say: Callable[[str], None], *, is_attended: bool) -> None:
        """`is_attended`: `say` prints on a terminal. Else others may read it too, and the link has no token."""
        self._say = say
        self._paths = paths
        self._is_attended = is_attended
        self._is_closed = False
        self._process: subprocess.Popen[str] | None = None
        words = ["--fileroot", str(paths.fileroot), "--port", str(port), "--keys", str(paths.keys), "--with-driver"]
        words += ["--run", f"{paths.user}/{paths.experiment_name}/{paths.trial_name}"]
        try:
            make_watch_token(paths.keys)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.watch", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is the driver's: the page shows how the run stops
            )
        except (OSError, StorageError) as error:
            say(f"the watch page could not be started: {error}")
        else:
            threading.Thread(target=self._listen, args=(self._process,), name="watch", daemon=True).start()

    def close(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        said = []
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith("http://"):
                    self._say(self._link(line.strip()))
                else:
                    said.append(line.rstrip())
        if not self._is_closed:
            self._say("\n".join([f"the watch page has ended, with code {process.wait()}; the run continues", *said]))

    def _link(self, link: str) -> str:
        if self._is_attended:
            return f"watch it: {link}"
        return (
            f"watch it: {link.partition('#')[0]} (its token is in {self._paths.keys / 'watch_token'}: …/#token=<token>)"
        )
