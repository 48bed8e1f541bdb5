"""`python -m launcher doctor` as a person runs it, here and where the stand-in answers for NVIDIA's driver."""

import contextlib
import os
import subprocess
import sys

import pytest

from launcher.__main__ import main
from launcher.base.findings import Finding, Severity
from launcher.cli import doctor
from tests.support.machine import scaled


def asked(library=None, **answers):
    given = {f"NVML_{name.upper()}": str(value) for name, value in answers.items()}
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | given
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library.parent)
    command = [sys.executable, "-m", "launcher", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False, env=environment)


def test_on_this_machine_a_run_on_the_cpu_can_start():
    done = asked()
    assert done.returncode in (doctor.CPU_ONLY, doctor.GPU_AND_CPU), done.stderr
    assert "a run on the CPU can start" in done.stdout
    assert "sglang 0." in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_with_a_driver_and_gpus_a_run_on_a_gpu_can_start(nvml_library):
    done = asked(nvml_library, gpus=8)
    assert "GPU 0-7" in done.stdout
    assert done.returncode == doctor.GPU_AND_CPU, done.stdout


@pytest.mark.slow
def test_with_an_old_driver_only_the_cpu_is_left(nvml_library):
    done = asked(nvml_library, gpus=1, cuda=12040, driver="550.54.14")
    assert done.returncode == doctor.CPU_ONLY, done.stdout
    assert "a run on a GPU can't start: driver" in done.stdout
    assert "install a driver of branch 580 or newer" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("stops", "code", "said"),
    [
        (Severity.BAD, doctor.NEITHER, "a run on the CPU can't start: x"),
        (Severity.GPU, doctor.CPU_ONLY, "a run on a GPU can't start: x"),
        (Severity.SHARED, doctor.GPU_AND_CPU, "but not runs that share a GPU: x"),
        (Severity.OK, doctor.GPU_AND_CPU, "a run on a GPU can start"),
        (Severity.UNKNOWN, doctor.GPU_AND_CPU, "not known: x"),
        (
            Severity.UNKNOWN,
            doctor.GPU_AND_CPU,
            "a run on the CPU can start\na run on a GPU can start, as far as is known\n",
        ),
    ],
)
def test_the_exit_code_is_what_can_start(monkeypatch, capsys, stops, code, said):
    checks = (Finding(subject="x", text="bad", level=stops, hint="mend"),)
    monkeypatch.setattr(doctor, "check_node", lambda: checks)
    assert doctor.run([]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("place", "code", "said"), [("pipe", doctor.CPU_ONLY, ""), ("/dev/full", 2, "No space left")])
def test_a_table_that_nobody_reads_or_no_disk_takes(monkeypatch, capfd, place, code, said):
    """`doctor | head -1` was a traceback."""
    checks = (Finding(subject="x", text="bad", level=Severity.GPU, hint="mend"),)
    monkeypatch.setattr(doctor, "check_node", lambda: checks)
    monkeypatch.setattr(sys, "argv", ["launcher", "doctor"])
    if place == "pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(place, os.O_WRONLY)
    out = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", out)
    assert main() == code
    with contextlib.suppress(OSError):  # what could not be written is written once more
        out.close()
    assert said in (told := capfd.readouterr().err)
    assert "Traceback" not in told
