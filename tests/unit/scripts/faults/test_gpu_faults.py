"""A process starts again on a GPU that another one has filled: that one's own code, on a torch that is made here."""

import threading
import time

import pytest

from launcher.run_files.journal import append_line
from scripts.faults import gpu_faults
from scripts.run_processes import find_run
from tests.support.fault_game import deadline_s, gone

TORCH = """
import os, pathlib
FREE = pathlib.Path(os.environ["MADE_GPU"])
uint8 = None
class OutOfMemoryError(RuntimeError): ...
def zeros(count, device): ...
def empty(count, dtype, device):
    free = cuda.mem_get_info(device)[0]
    if count > free - 1000:
        FREE.write_text(str(free - 1000))  # somebody else was faster
        raise OutOfMemoryError
    FREE.write_text(str(free - count))
class cuda:
    device_count = staticmethod(lambda: 1)
    mem_get_info = staticmethod(lambda device: (int(FREE.read_text()), 0))
"""
MIB = 2**20
FREE, LEFT = 4096 * MIB, 256 * MIB


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """The file that says how much of it is free."""
    (tmp_path / "made" / "torch").mkdir(parents=True)
    (tmp_path / "made" / "torch" / "__init__.py").write_text(TORCH)
    free = tmp_path / "free"
    free.write_text(str(FREE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "made"))
    monkeypatch.setenv("MADE_GPU", str(free))
    monkeypatch.setattr(gpu_faults, "GPU_FILES", "/dev/null")  # that the fake trainer holds open
    return free


def say_that_it_ran_out(game, gpu, subject):
    """As the run does, once the GPU is full."""
    deadline = time.monotonic() + deadline_s()
    while int(gpu.read_text() or FREE) > LEFT and time.monotonic() < deadline:
        time.sleep(0.01)
    line = {"event": "memory.ran_out", "subject": subject, "ran_out": "device", "reason": "less"}
    append_line(game.paths.events, line | {"monotonic": time.monotonic()})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "subject"), [("C9:server=0", "server-0"), ("T8", "trainer")])
def test_the_gpu_is_full_while_it_starts_and_is_given_back_when_the_run_has_said_so(game, gpu, kind, subject):
    game.step()
    found = find_run(game.paths)
    meant = [one.pid for one in (found.server(0).tree if kind[0] == "C" else [found.trainer])]
    thread = threading.Thread(target=say_that_it_ran_out, args=(game, gpu, subject))
    thread.start()
    assert game.inject(kind, "--even-the-last") == 0
    thread.join()
    fired = game.fired()
    assert (fired["target"], fired["proof"], sorted(fired["pids"])) == (subject, "device: less", sorted(meant))
    assert gone(meant)
    assert int(gpu.read_text()) == LEFT


@pytest.mark.slow
def test_one_that_starts_all_the_same_or_is_on_no_gpu(game, gpu, monkeypatch, capsys):
    game.step()
    assert game.inject("C9:seconds=0.3") == 1
    assert "did not run out of memory in time" in game.record()[-1]["reason"]
    monkeypatch.setattr(gpu_faults, "GPU_FILES", "/dev/nvidia")
    assert game.inject("T8", "--even-the-last") == 2
    assert "T8: this run is not on a GPU\n  → T6 takes the host's memory" in capsys.readouterr().err


def test_a_machine_on_which_nothing_can_be_held_kills_nobody(monkeypatch):
    with pytest.raises(gpu_faults.Missed, match="no process can take"), gpu_faults.holder(0, "raise SystemExit(1)"):
        pass
