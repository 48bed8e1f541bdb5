"""Tools whose reader has seen enough, or takes no UTF-8, or is a full disk; and Ctrl-C: never a traceback."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.errors import CheckpointError, UsageError
from launcher.reporting.terminal_text import visible
from launcher.run_files.run_paths import RunPaths
from scripts.ending import ended, print_json
from tests.support.long_run import LongRun

PYTHON = (sys.executable, "-m")
TOOLS = {
    "list_checkpoints": (["--json"], 1),
    "check_health": (["--json"], 1),
    "diagnose": (["--json"], 0),
    "report": (["--json"], 0),
    "run_control": (["status", "--json"], 1),
}
"""With the exit code of a run that has finished without a checkpoint."""


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    paths = RunPaths(
        fileroot=tmp_path_factory.mktemp("run"), user="me", experiment_name="e", trial_name="größe → ×2"
    )  # names in no ASCII
    LongRun(paths, steps=60, incidents=0).write()
    (paths.logs / "config.yaml").write_text("experiment_name: e\n")
    paths.lock.touch()  # free: without one each tool waits eight seconds for a beat of the run
    return [
        "--experiment-name",
        "e",
        "--trial-name",
        paths.trial_name,
        "--fileroot",
        str(paths.fileroot),
        "--user",
        "me",
    ]


def run(tool, *words, **more):
    return subprocess.run([*PYTHON, f"scripts.{tool}", *words], stderr=subprocess.PIPE, text=True, **more, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_nobody_reads_on(tool, names):
    """`… | true`: the first byte already finds nobody."""
    words, code = TOOLS[tool]
    reading, writing = os.pipe()
    os.close(reading)
    for said in (words, [word for word in words if word != "--json"]):
        done = run(tool, *said, *names, stdout=writing)
        assert (done.stderr, done.returncode) == ("", code)
    os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_a_reader_that_takes_ascii_alone(tool, names):
    words, code = TOOLS[tool]
    ascii_alone = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run(tool, *words, *names, stdout=subprocess.PIPE, env=ascii_alone)
    assert (done.stderr, done.returncode) == ("", code)
    assert done.stdout.isascii()
    json.loads(done.stdout)
    done = run(tool, *(word for word in words if word != "--json"), *names, stdout=subprocess.PIPE, env=ascii_alone)
    assert (done.stderr, done.returncode) == ("", code)
    assert "gr??e -> x2" in done.stdout or tool == "diagnose"


@pytest.mark.slow
def test_the_launcher_at_an_ascii_terminal(tmp_path):
    command = [*PYTHON, "launcher", "conf=arithmetic_cpu", "dry_run=true", f"cluster.fileroot={tmp_path}"]
    ascii_alone = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_alone, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "UnicodeEncodeError" not in done.stderr


@pytest.mark.slow
def test_a_full_disk_is_named(names):
    with Path("/dev/full").open("w") as full:
        done = run("run_control", "status", "--json", *names, stdout=full)
    assert done.returncode == 2
    assert "standard output can't be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_its_libraries_are_read():
    as_in_a_terminal = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    begins = (
        f"{as_in_a_terminal}; import os, sys; sys.argv = ['-m']; import scripts; os.kill(os.getpid(), signal.SIGINT)"
    )
    done = subprocess.run([sys.executable, "-c", begins], stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "interrupted\n"
    assert done.returncode == -signal.SIGINT


def test_another_error_while_its_libraries_are_read_keeps_its_traceback():
    begins = "import sys; sys.argv = ['-m']; import scripts; 1 / 0"
    done = subprocess.run([sys.executable, "-c", begins], stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("no such run", "name another"), 2, "error: no such run\n  → name another\n"),
        (CheckpointError("it is torn"), 1, "error: it is torn\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 7, ""),
    ],
)
def test_what_ends_a_tool_is_its_exit_code_and_one_message(error, code, said, capfd):
    assert ended(raising(error), refused=1, unread=7) == code
    assert capfd.readouterr().err == said


def test_a_defect_keeps_its_traceback_and_so_does_a_file_of_the_tools_own():
    for error in (ZeroDivisionError(), FileNotFoundError(2, "No such file", "/there")):
        with pytest.raises(type(error)):
            ended(raising(error))


def test_json_has_null_for_what_is_no_number(capsys):
    print_json({"reward": float("nan"), "rows": [(1.5, float("inf"))], "name": "größe"})
    assert json.loads(capsys.readouterr().out) == {"reward": None, "rows": [[1.5, None]], "name": "größe"}


def test_a_stream_that_the_caller_has_closed_changes_no_exit_code():
    """`2>&-`, as of some services: Python has None there."""
    program = (
        "import sys; from scripts.ending import ended; from launcher.base.errors import UsageError\n"
        "def run():\n    print('printed'); raise UsageError('no such run')\n"
        "sys.exit(ended(run))"
    )
    for closed in ("2>&-", ">&-", ">&- 2>&-"):
        command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2, (closed, done.stderr)
        assert done.stdout == ("printed\n" if closed == "2>&-" else "")


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم",  # Persian, with the joiner's opposite between its two parts
        "क्\u200dष",
        "👩\u200d💻 ❤\ufe0f\u200d🔥 👍🏽",
        "\U0001fa77",  # newer than the Unicode of Python 3.11
        "שלום مرحبا 한국어",
        "a\u00a0b\tc\n→",
    ],
)
def test_what_ordinary_text_holds_is_printed_as_it_is(text):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u200db", "a\\u200db"),
        ("\u200c", "\\u200c"),
        ("می\u200c", "می\\u200c"),
        ("می\u200c\u200cخ", "می\\u200c\\u200cخ"),
        ("→\u202e\u200d\x9b1m\r\n→\x7f", "→\\u202e\\u200d\\u009b1m\\r\n→\\u007f"),
    ],
)
def test_what_joins_nothing_or_commands_is_an_escape(text, shown):
    assert visible(text) == shown
