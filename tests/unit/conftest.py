"""A run's folders; a full disk, which is a filesystem of 512 KiB; GPUs that NVML's real binding finds; a time zone."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.run_files.run_paths import RunPaths
from tests.support import nvml

TINY_BYTES = 512 * 1024


@dataclass
class TinyDisk:
    path: Path

    def free(self) -> int:
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def __truediv__(self, name: str) -> Path:
        return self.path / name


@pytest.fixture(autouse=True)
def _torch_in_one_thread():
    """The models of these tests are tiny: more threads only wait for each other, above all on a busy machine."""
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@pytest.fixture
def zone(monkeypatch):
    """The time zone of this machine, while it writes or reads: chosen by its name."""

    def choose(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield choose
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def tiny_disk(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TINY_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a filesystem needs root; the RLIMIT_FSIZE tests cover a refused write without it")
    yield TinyDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def paths(tmp_path):
    """Of a run that has its folders."""
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    return paths


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(monkeypatch, nvml_library):
    """Call it with what the driver's library is to answer (tests/programs/nvml_stand_in.c)."""
    return lambda **answers: nvml.load(monkeypatch, nvml_library, **answers)
