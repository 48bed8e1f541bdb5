"""What a reward function prints is in trainer.log; what the trainer's own process says as it ends is in Ray's file."""

import asyncio
import socket
import subprocess
import sys

import pytest

from actors.reward import user_process
from launcher.config.schema import RewardConfig
from tests.support.machine import scaled

PRINTS_AND_CRASHES = """
import os, subprocess, sys, time
from types import SimpleNamespace
from pathlib import Path
from actors.training.trainer import Trainer
from actors.reward import user_process
log = Path(sys.argv[1])
trainer = object.__new__(Trainer.__ray_metadata__.modified_class)
trainer._printed, trainer._paths = None, SimpleNamespace(trainer_log=log)
trainer._print_to_log()
functions = user_process._prints_to
subprocess.run(["sh", "-c", "echo said by the function; echo and its error >&2"], stdout=functions, stderr=functions)
while not log.exists() or log.read_text().count("\\n") < 2:
    time.sleep(0.01)
os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n")
os.abort()
"""


@pytest.mark.parametrize("variable", [None, "1"])
def test_a_line_is_written_at_once_and_whole_though_its_process_is_killed(tmp_path, monkeypatch, variable):
    """With the variable Python hands each of the words of a print on by itself."""
    monkeypatch.setenv("PYTHONUNBUFFERED", variable) if variable else monkeypatch.delenv("PYTHONUNBUFFERED", False)
    (tmp_path / "talks.py").write_text("print('said', 'by the function')\ndef score(*_, **__): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    async def import_it():
        process = user_process.UserProcess(RewardConfig(fn="talks:score"))
        try:
            await process.ready()
        finally:
            await process.close()

    with ours, theirs:
        ours.settimeout(scaled(30))
        monkeypatch.setattr(user_process, "_prints_to", theirs.fileno())
        asyncio.run(import_it())
        assert ours.recv(100) == b"said by the function\n"


@pytest.mark.slow
def test_what_a_function_prints_is_in_the_log_and_an_abort_is_told(tmp_path):
    log = tmp_path / "trainer.log"
    words = [sys.executable, "-c", PRINTS_AND_CRASHES, str(log)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert log.read_text() == "said by the function\nand its error\n"
    assert "std::bad_alloc" in ended.stderr
