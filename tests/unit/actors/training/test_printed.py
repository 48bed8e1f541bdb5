"""What a trainer prints is in its log; of a crash the stack is told to the file that Ray gave it."""

import subprocess
import sys

import pytest

CRASHES = """
import ctypes, os, sys, time
from types import SimpleNamespace
from pathlib import Path
from actors.training.trainer import Trainer
log = Path(sys.argv[1])
trainer = object.__new__(Trainer.__ray_metadata__.modified_class)
trainer._printed, trainer._paths = None, SimpleNamespace(trainer_log=log)
import faulthandler
faulthandler.enable(all_threads=False)  # as Ray does in each of its workers
trainer._print_to_log()
print("said by the function", flush=True)
while not log.exists() or not log.read_text().endswith("\\n"):
    time.sleep(0.01)
ctypes.string_at(0)
"""


@pytest.mark.slow
def test_what_is_printed_is_in_the_log_and_a_crash_is_told(tmp_path):
    log = tmp_path / "trainer.log"
    ended = subprocess.run([sys.executable, "-c", CRASHES, str(log)], capture_output=True, text=True, timeout=120)
    assert log.read_text() == "said by the function\n"
    assert "Fatal Python error: Segmentation fault" in ended.stderr, ended.stderr
    assert "ctypes" in ended.stderr
