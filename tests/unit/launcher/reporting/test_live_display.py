"""What a person sees of a run that goes on, in a terminal and in a log."""

import os
import pty
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from launcher.reporting.live_display import HEARTBEAT_S, LINE_EVERY_S, Display, is_worth_a_line
from launcher.reporting.terminal_panel import render_line
from tests.support.machine import scaled
from tests.support.run_views import view

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("step", "elapsed", "worth"),
    [
        (5, 100.0 + HEARTBEAT_S - 1, False),
        (5, 100.0 + HEARTBEAT_S, True),
        (6, 100.0 + LINE_EVERY_S - 0.1, False),
        (6, 100.0 + LINE_EVERY_S, True),
        (20, 100.1, True),
    ],
)
def test_which_views_a_log_gets(step, elapsed, worth):
    last = view(steps_done=5, total_steps=20, elapsed_s=100.0)
    assert is_worth_a_line(last, None)
    assert is_worth_a_line(view(steps_done=step, total_steps=20, elapsed_s=elapsed), last) == worth


def test_a_log_gets_plain_lines_without_control_characters(tmp_path):
    with (tmp_path / "log").open("w", encoding="utf-8") as stream, Display(stream) as display:
        display.line("server 0: READY after 23 s")
        display.update(view())
        display.update(view(elapsed_s=95.1))
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines == ["server 0: READY after 23 s", render_line(view())]


def test_a_log_in_ascii_gets_question_marks_not_an_error(tmp_path):
    with (tmp_path / "log").open("w", encoding="ascii") as stream, Display(stream) as display:
        display.line("reward 0.3 → 0.9")
        display.line("done")
    assert (tmp_path / "log").read_text() == "reward 0.3 ? 0.9\ndone\n"


def test_a_closed_stream_silences_the_display_only(tmp_path):
    stream = (tmp_path / "log").open("w")
    display = Display(stream)
    stream.close()
    display.line("x")
    display.update(view())
    display.close()


def test_a_full_disk_behind_the_log_silences_the_display_only():
    with open("/dev/full", "w") as stream:  # noqa: PTH123
        display = Display(stream)
        display.line("x")
        display.line("y")


BROKEN_PIPE = """
import sys
from tests.support.run_views import view
from launcher.reporting.live_display import Display
display = Display(sys.stdout)
sys.stdin.read()
for number in range(3):
    display.line("x" * 100)
sys.exit(3)
"""


def test_a_reader_that_goes_away_does_not_mask_the_exit_code():
    child = subprocess.Popen(
        [sys.executable, "-c", BROKEN_PIPE],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    child.stdin.close()
    assert child.wait(timeout=scaled(60)) == 3
    assert child.stderr.read() == b""
    child.stderr.close()


class Screen:
    """What was written to a terminal. A thread reads it, since a terminal that nobody reads blocks its writer."""

    def __init__(self, reader):
        self._text = ""
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(reader,), daemon=True).start()

    def _read(self, reader):
        while True:
            try:
                data = os.read(reader, 4096)
            except OSError:  # the writing end was closed
                os.close(reader)
                return
            with self._changed:
                self._text += data.decode(errors="replace")
                self._changed.notify()

    def until(self, words):
        """All that was written since the last call, once it ends in a text that holds `words`."""
        with self._changed:
            assert self._changed.wait_for(lambda: words in self._text, timeout=scaled(30)), self._text
            text = self._text
            self._text = ""
            return text


@pytest.fixture
def terminal(monkeypatch):
    """A real terminal of 80 columns: its writing end as a stream, and what is seen on it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (30, 80))
    stream = open(writer, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    yield stream, Screen(reader)
    stream.close()


PANEL_END = "╯"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
ERASE_LINE = "\x1b[2K"


def test_in_a_terminal_the_panel_is_redrawn_in_place_and_given_back(terminal):
    stream, screen = terminal
    display = Display(stream)
    display.line("server 0: READY")
    display.update(view(steps_done=1))
    first = screen.until(PANEL_END)
    display.update(view(steps_done=2))
    display.line("server.died")
    display.close()
    display.line("FINISHED")
    rest = screen.until("FINISHED")
    assert "server 0: READY" in first
    assert "1/200" in first
    assert HIDE_CURSOR in first
    assert rest.count("\x1b[1A") >= 7  # up over the panel, instead of a second one below
    assert rest.index("server.died") < rest.rindex("2/200") < rest.index(SHOW_CURSOR) < rest.index("FINISHED")


def test_what_others_print_goes_above_the_panel(terminal, monkeypatch):
    stream, screen = terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with Display(stream) as display:
        display.update(view())
        screen.until(PANEL_END)
        print("(Trainer pid=42) printed by Ray")
        before, _, after = screen.until("(Trainer pid=42) printed by Ray").partition("(Trainer pid=42) printed by Ray")
        assert ERASE_LINE in before.rpartition("37/200")[2], "the panel is taken away first, however often it was drawn"
        print("and on stderr", file=sys.stderr)
        after += screen.until("and on stderr")
        assert "37/200" in after.partition("and on stderr")[0]
    assert sys.stdout is stream
    assert sys.stderr is stream


def test_stderr_that_is_a_file_stays_in_its_file(terminal, monkeypatch, tmp_path):
    stream, screen = terminal
    with (tmp_path / "err").open("w") as err:
        monkeypatch.setattr(sys, "stderr", err)
        with Display(stream) as display:
            display.update(view())
            print("to the file", file=sys.stderr)
    assert (tmp_path / "err").read_text() == "to the file\n"
    assert "to the file" not in screen.until(SHOW_CURSOR)


def test_a_terminal_that_cant_move_its_cursor_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream, screen = terminal
    with Display(stream) as display:
        display.update(view())
    assert screen.until("\n") == render_line(view()) + "\r\n"
