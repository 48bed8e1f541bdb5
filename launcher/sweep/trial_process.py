"""Starts one trial as a child process: the ordinary command of a single run, in its own session.

A terminal's Ctrl-C goes to every process in the foreground: only the sweep gets it, and passes it on once, on which a
run saves and ends. If the sweep itself is killed the kernel sends the same signal, so that no trial runs on unseen.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.base.errors import printed_error
from launcher.base.parent_death import end_with

LAST_LINES = 3


class TrialProcess:
    """Started on construction; what it prints is appended to `log`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("ab") as output:
            self._begins_at = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=end_with(os.getpid(), signal.SIGINT, code=130),  # noqa: PLW1509 - the sweep has one thread
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number where one ended it."""
        return self._process.poll()

    def interrupt(self) -> None:
        """As Ctrl-C: the first saves and ends, the second ends at once."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _output(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._begins_at)
            return log.read().decode(errors="replace").strip()

    def last_lines(self) -> str:
        """What it printed last, in one line."""
        return " ".join(" ".join(self._output().splitlines()[-LAST_LINES:]).split())

    def refusal(self) -> str:
        """Its one message where it was refused, without the hint."""
        found = printed_error(self._output())
        return self.last_lines() if found is None else " ".join(found[0].split())
