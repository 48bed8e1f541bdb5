"""What a person sees of a run that goes on, in a terminal and in a log."""

import io
import math
import os
import pty
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from launcher.base.messages import EvalReport, ServerInfo, ServerState, TrainerStatus
from launcher.reporting.formats import duration
from launcher.reporting.live_display import HEARTBEAT_S, LINE_EVERY_S, Display, is_worth_a_line
from launcher.reporting.run_view import RunProgress, RunView
from launcher.reporting.terminal_panel import render_line, render_panel, sparkline

REPOSITORY = Path(__file__).resolve().parents[4]


def server(index, state, version=None, reason=""):
    return ServerInfo(
        name=f"llm_server-{index}", index=index, generation=1, state=state, weight_version=version, reason=reason
    )


def view(*, steps_done=37, total_steps=200, **changes):
    defaults = {
        "status": TrainerStatus(
            phase="train",
            next_step=steps_done,
            total_steps=total_steps,
            steps_per_epoch=100,
            policy_version=steps_done,
            pid=1,
            seconds_in_phase=0.42,
        ),
        "title": "arithmetic_cpu / trial0",
        "attempt": 1,
        "elapsed_s": 95.0,
        "rewards": tuple(0.3 + 0.01 * step for step in range(37)),
        "step_seconds": (1.0, 2.0, 9.0),
        "tokens_per_s": 1843.2,
        "servers": (server(0, ServerState.READY, 37),),
        "last_event": "checkpoint.committed epoch0epochstep19globalstep19",
    }
    return RunView(**(defaults | changes))


def drawn(run_view, width):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(render_panel(run_view, width))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_panel_says_everything_in_a_few_whole_rows(width):
    lines = drawn(view(), width)
    text = "\n".join(lines)
    for words in (
        "arithmetic_cpu / trial0",
        "37/200",
        "18%   epoch 1/2",
        "0.660   last 10: 0.615",
        "train 0.4 s   1,843 tokens/s   policy version 37",
        "0 READY v37",
        "1:35   about 5:26 left",
        "checkpoint.committed epoch0epochstep19globalstep19",
    ):
        assert words in text
    assert len(lines) == 8
    assert {cell_len(line) for line in lines} == {min(width, 110)}


def test_the_height_does_not_depend_on_how_much_there_is_to_say():
    dead = server(0, ServerState.DEAD, reason="y\n" * 250)
    long = view(last_event="x\n" * 250, servers=(dead,), rewards=(0.5,) * 100)
    assert len(drawn(long, 80)) == len(drawn(view(), 80))
    assert {cell_len(line) for line in drawn(long, 80)} == {80}


@pytest.mark.parametrize("width", [20, 30, 40])
def test_a_narrow_terminal_loses_words_not_the_frame(width):
    assert {cell_len(line) for line in drawn(view(), width)} == {width}


def test_markup_in_a_reason_is_text():
    assert any("[/red] [bold]" in line for line in drawn(view(last_event="[/red] [bold]"), 80))


def test_before_the_first_step():
    early = view(steps_done=0, rewards=(), step_seconds=(), tokens_per_s=None, servers=(), last_event="")
    text = "\n".join(drawn(early, 80))
    assert "none yet" in text and "left" not in text
    assert "servers none yet" in render_line(early)


def test_accuracy_on_held_out_problems_before_and_after():
    before = EvalReport(policy_version=0, prompts=256, sampled=0.341, greedy=0.5)
    after = EvalReport(policy_version=200, prompts=256, sampled=0.812, greedy=0.9)
    assert "held-out  sampled 0.341   greedy 0.500   (256 problems)" in "\n".join(drawn(view(evals=(before,)), 80))
    both = "\n".join(drawn(view(evals=(before, after)), 80))
    assert "sampled 0.341 → 0.812   greedy 0.500 → 0.900" in both


def test_many_servers_are_counted_and_the_unwell_are_not_lost():
    servers = [server(index, ServerState.READY, 3) for index in range(62)]
    servers += [server(62, ServerState.STARTING), server(63, ServerState.DEAD)]
    assert "1 STARTING · 62 READY · 1 DEAD" in "\n".join(drawn(view(servers=tuple(servers)), 80))


def test_why_a_server_is_not_ready():
    assert "0 SUSPECT v3 (no token for 12 s)" in render_line(
        view(servers=(server(0, ServerState.SUSPECT, 3, "no token for 12 s"),))
    )


def test_a_long_reason_is_cut():
    said = render_line(view(servers=(server(0, ServerState.DEAD, 3, "did not become ready: " + "x" * 300),)))
    assert "0 DEAD v3 (did not become ready: xxx" in said
    assert "…)" in said and len(said) < 250


def test_a_line_for_a_log():
    assert render_line(view()) == (
        "step 37/200  epoch 1/2  reward 0.660  last 10: 0.615  1843 tokens/s  train 0.4 s  "
        "servers 0 READY v37  5:26 left"
    )


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 5, ""),
        ([math.nan], 5, ""),
        ([0.0, 1.0], 5, "▁█"),
        ([0.0, 0.5, 1.0, 0.0], 2, "█▁"),
        ([0.0, math.nan, 1.0], 5, "▁ █"),
        ([0.50, 0.51, 0.49], 5, "▁▂▁"),  # noise looks like noise
        ([0.5] * 3, 5, "▁▁▁"),
        ([0.0, 1.0], 0, ""),
    ],
)
def test_the_trend_as_bars(values, width, bars):
    assert sparkline(values, width) == bars


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (4.23, "4.2 s"), (59.4, "59 s"), (60, "1:00"), (187.2, "3:07"), (7387, "2:03:07")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def report(step, reward, **metrics):
    rewards = {} if reward is None else {"rollout/reward": reward}
    return {"global_step": step, "attempt": 1, "timeperf/step_s": 2.0} | rewards | metrics


def status(next_step, *, total_steps=20):
    return TrainerStatus(
        phase="rollout",
        next_step=next_step,
        total_steps=total_steps,
        steps_per_epoch=10,
        policy_version=next_step,
        pid=1,
        seconds_in_phase=0.0,
    )


def progress():
    return RunProgress("exp / t0", 1, started=100.0)


def test_a_view_is_gathered_from_reports():
    gathered = progress()
    gathered.add([report(0, 0.2, **{"rollout/tokens_per_s": 900.0}), report(1, None), report(2, 0.4)])
    gathered.last_event = "server.ready"
    shown = gathered.view(status(3), servers=[], now=160.0)
    assert repr(shown.rewards) == "(0.2, nan, 0.4)"
    assert shown.recent_reward == pytest.approx(0.3)
    assert (shown.steps_done, shown.epochs, shown.elapsed_s, shown.left_s) == (3, "1/2", 60.0, 34.0)
    assert (shown.tokens_per_s, shown.last_event) == (900.0, "server.ready")


def test_a_restore_takes_the_later_rewards_back():
    gathered = progress()
    gathered.add([report(step, 0.1 * step) for step in range(4)])
    gathered.add([report(2, 0.9)])
    assert gathered.view(status(3), servers=[], now=100.0).rewards == (0.0, 0.1, 0.9)


@pytest.mark.parametrize(("next_step", "epoch"), [(0, 1), (9, 1), (10, 2), (19, 2), (20, 2)])
def test_the_epoch_of_the_step_under_way(next_step, epoch):
    assert progress().view(status(next_step), servers=[], now=100.0).epochs == f"{epoch}/2"


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
    assert child.wait(timeout=60) == 3
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
            assert self._changed.wait_for(lambda: words in self._text, timeout=30), self._text
            text, self._text = self._text, ""
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
    assert "server 0: READY" in first and "1/200" in first and HIDE_CURSOR in first
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
        assert "37/200" not in screen.until("printed by Ray").partition("printed by Ray")[0]
        print("and on stderr", file=sys.stderr)
        assert "37/200" in screen.until("and on stderr")
    assert sys.stdout is stream and sys.stderr is stream


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
