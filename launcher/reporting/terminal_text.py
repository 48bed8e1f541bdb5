"""Text output for any reader: a terminal or a pipe without UTF-8, and a reader that closes the pipe early.

…→…  on ASCII: …->…        `… | head -1`: no traceback, and the exit code still reports what was found
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator

from rich.console import Console

from launcher.base.errors import ResourceError

PLAIN = "grpo-plain"
INSTEAD = {"→": "->", "·": "|", "×": "x", "–": "-", "—": "-", "…": "...", "─": "-", "━": "-", "│": "|", "ℓ": "l"}


def _instead(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(INSTEAD.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def speak_anywhere() -> None:
    """From now on no character ends the program that prints it."""
    codecs.register_error(PLAIN, _instead)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)


def takes_all_letters() -> bool:
    """Can standard output print any character? JSON is escaped where it can't."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()


class PipedConsole(Console):
    """Rich's own console ends the program with 1 when the reader closes the pipe, whatever the program had found."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console_of_width(otherwise: int) -> PipedConsole:
    """As wide as the terminal; `otherwise` where the output goes into a file or a pipe."""
    return PipedConsole(highlight=False, width=None if sys.stdout.isatty() else otherwise)


@contextlib.contextmanager
def as_far_as_it_is_read() -> Iterator[None]:
    """What is printed inside is on its way at the end, unless nobody reads on. Raises ResourceError: it can't be."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is not None:  # a file's own, of what was done inside
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ResourceError(f"standard output can't be written: {error.strerror}", "write to another place") from error
