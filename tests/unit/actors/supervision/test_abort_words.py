"""What native code says as it aborts is found where Ray has a worker print it, and in no log."""

import asyncio
import subprocess
import sys

import pytest

from actors.processes.process_tree import errors_file
from actors.serving.server_log_tail import TAIL_BYTES, words_of_abort
from actors.supervision.trainer_handle import ProcessId, TrainerExit
from launcher.base.messages import Cause
from launcher.policy.exit_cause import RanOut

STARVED = """
import resource, sys
from safetensors import serialize_file

words = open("/proc/self/status").read().split()
held = int(words[words.index("VmData:") + 1]) * 1024
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_DATA, (held + 2**19, resource.RLIM_INFINITY))
serialize_file({}, sys.argv[1])
"""
"""Rust's part of safetensors asks for 1 MiB to write through."""
PRINTS = "import os, sys; sys.stdin.readline(); os.write(2, b'mmap error: 12\\nMemoryError\\n'); os._exit(1)"
ABORTS = "import os, sys; sys.stdin.readline(); os.abort()"


def ended(tmp_path, program):
    """The process's errors as they are found after its end, and what they show."""
    errors = tmp_path / "worker.err"
    words = [sys.executable, "-X", "faulthandler", "-c", program, str(tmp_path / "model.safetensors")]
    with (
        errors.open("wb") as file,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=file) as process,
    ):
        assert errors_file(process.pid) == errors
        exit_of = TrainerExit(ProcessId("", process.pid), tmp_path / "trainer.log")
        process.communicate(b"\n")
    return words_of_abort(errors), asyncio.run(exit_of.find(0, since=0))


def test_memory_that_native_code_does_not_get_is_its_reason(tmp_path):
    said, found = ended(tmp_path, STARVED)
    assert said.startswith("memory allocation of ")
    assert (found.cause, found.ran_out) == (Cause.TRAINER_OOM, RanOut.TRAINER_HOST)
    assert found.line.startswith("memory allocation of ")


def test_what_is_printed_and_outlived_is_no_reason(tmp_path):
    """Any line of a worker may speak of memory: only one that nobody outlives counts."""
    said, found = ended(tmp_path, PRINTS)
    assert (said, found.ran_out) == ("", None)


def test_an_abort_for_another_reason_is_none_of_memory(tmp_path):
    said, found = ended(tmp_path, ABORTS)
    assert said.startswith("Fatal Python error: Aborted")
    assert found.ran_out is None


@pytest.mark.parametrize("printed", [b"MemoryError\n", b"", None])
def test_without_last_words_nothing_is_said(tmp_path, printed):
    file = tmp_path / "worker.err"
    if printed is not None:
        file.write_bytes(printed)
    assert words_of_abort(file) == words_of_abort(None) == ""


def test_of_cxx_the_line_after_it_names_the_reason(tmp_path):
    file = tmp_path / "worker.err"
    file.write_bytes(
        b"loading\nterminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    )
    assert words_of_abort(file).splitlines()[1:] == ["  what():  std::bad_alloc"]


def test_they_are_found_behind_all_that_a_long_life_printed(tmp_path):
    file = tmp_path / "worker.err"
    file.write_bytes(b"a warning\n" * TAIL_BYTES + b"memory allocation of 1048576 bytes failed\n")
    assert words_of_abort(file) == "memory allocation of 1048576 bytes failed\n"


def test_what_is_no_file_is_not_read():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert errors_file(process.pid) is None
        process.communicate(b"\n")
    assert errors_file(process.pid) is None
