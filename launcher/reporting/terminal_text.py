"""Text output for any reader: a terminal or a pipe without UTF-8, and a reader that closes the pipe early.

…→…  on ASCII: …->…        `… | head -1`: no traceback, and the exit code still reports what was found

Nothing that a run or a tool prints commands the terminal: not the text of a reason, a log, a file or an argument.
Characters that move the cursor, set a title, open a link, turn the reading direction or show nothing are printed as
JSON writes them (`\\u001b`), so JSON stays JSON. Joiners inside a word of Persian or Hindi, or inside an emoji, stay:
they show in what they join. `speak_anywhere` does it for standard output and error, `visible_on`
for another stream; colours come from a SafeConsole alone.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from launcher.base.errors import ResourceError

PLAIN = "grpo-plain"
INSTEAD = {"→": "->", "·": "|", "×": "x", "–": "-", "—": "-", "…": "...", "─": "-", "━": "-", "│": "|", "ℓ": "l"}
COMMANDS = ("Cc", "Cf", "Zl", "Zp", "Cs", "Cn")
"""Unicode's categories: controls, C1 among them; what has no width or sets a direction; separators; no characters."""
PICTURES = range(0x1F000, 0x1FB00)
"""Set aside for emoji, also those that are newer than this Python's Unicode."""
_LETTER = "[^\x00-\u02ff\u061c\u2000-\u206f\ud800-\udfff\ufeff\U000e0000-\U000e0fff]"
_JOINED = re.compile(f"(?<={_LETTER})([\u200c\u200d])(?={_LETTER})")


class _Visible(dict[int, str]):
    """For str.translate, filled as characters occur."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        is_shown = code in PICTURES or unicodedata.category(letter) not in COMMANDS
        self[code] = letter if is_shown else json.dumps(letter)[1:-1] if code != 0x7F else "\\u007f"  # JSON leaves DEL
        return self[code]


_VISIBLE = _Visible({ord(letter): letter for letter in "\n\t"})


def visible(text: str) -> str:
    """`text` with each character that a terminal would obey, or not show, as its escape; lines and tabs stay."""
    if text.isprintable():
        return text
    if text.isascii():
        return text.translate(_VISIBLE)
    return "\n".join(line if line.isprintable() else _visible_line(line) for line in text.split("\n"))


def _visible_line(line: str) -> str:
    """The joiners are the odd parts."""
    parts = _JOINED.split(line)
    return "".join(part if at % 2 else part.translate(_VISIBLE) for at, part in enumerate(parts))


class _VisibleStream:
    """A text stream that takes `visible` text only; all else is the stream's own."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def visible_on(stream: TextIO) -> TextIO:
    """`stream`, and what is written to it is `visible`."""
    return stream if isinstance(stream, _VisibleStream) else cast(TextIO, _VisibleStream(stream))


def _instead(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(INSTEAD.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def speak_anywhere() -> None:
    """From now on no character ends the program that prints it, and none commands the terminal."""
    codecs.register_error(PLAIN, _instead)
    sys.stdout, sys.stderr = (  # None: the caller has closed it (`2>&-`)
        os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") if stream is None else stream
        for stream in (sys.stdout, sys.stderr)
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
    sys.stdout = visible_on(sys.stdout)
    sys.stderr = visible_on(sys.stderr)


def discard(stream: TextIO) -> None:
    """Let further output go nowhere: Python's flush at exit would fail on it, and turn the exit code into 120."""
    with contextlib.suppress(OSError, ValueError):  # not a real file, or closed already: nothing is flushed at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def takes_all_letters() -> bool:
    """Can standard output print any character? JSON is escaped where it can't."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()


class SafeConsole(Console):
    """Rich's console for text that others wrote: the layout alone has colours and moves the cursor.

    Markup in it is none. Rich's own console ends the program with 1 when the reader closes
    the pipe, whatever the program had found; this one does not.
    """

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None, soft_wrap: bool = False) -> None:
        """`stream`: sys.stdout by default. `width` None: the terminal's."""
        stream = sys.stdout if stream is None else stream
        raw = stream.raw if isinstance(stream, _VisibleStream) else stream
        super().__init__(file=raw, width=width, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Text is made visible before it is laid out, since that makes it longer."""
        if isinstance(renderable, str):
            renderable = visible(renderable)
        elif isinstance(renderable, Text) and renderable.plain != (shown := visible(renderable.plain)):
            renderable = renderable.copy()
            renderable.plain = shown
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console_of_width(otherwise: int) -> SafeConsole:
    """As wide as the terminal; `otherwise` where the output goes into a file or a pipe."""
    return SafeConsole(width=None if sys.stdout.isatty() else otherwise)


@contextlib.contextmanager
def as_far_as_it_is_read() -> Iterator[None]:
    """What is printed inside is on its way at the end, unless nobody reads on. Raises ResourceError: it can't be."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        if error.filename is not None:  # a file's own, of what was done inside
            raise
        discard(sys.stdout)
        raise unwritten(error) from error


def unwritten(error: OSError) -> ResourceError:
    """What standard output refused."""
    return ResourceError(f"standard output can't be written: {error.strerror}", "write to another place")
