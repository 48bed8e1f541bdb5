"""The machine is looked at as it is; who holds a GPU's memory is told, and one that is lost."""

from types import SimpleNamespace

import pytest

from launcher.resources import hardware
from launcher.resources.hardware import Gpu
from launcher.run_files.run_paths import RunPaths
from scripts.health import machine_check
from scripts.health.findings import ABSENT, BAD, NOTE, OK
from scripts.health.machine_check import check_gpus, check_memory
from tests.support.health_parts import subject_of


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    return paths


def test_this_machine_can_be_looked_at(paths):
    memory, kills = check_memory(subject_of(paths))
    assert memory.facts["used_bytes"] > 0
    assert kills.subject == "kills for memory"
    gpus = check_gpus(subject_of(paths))
    assert {finding.verdict for finding in gpus} <= {OK, NOTE, ABSENT}


class Nvml:
    """One full GPU, on which this process and a stranger's are; or one that has fallen off the bus."""

    NVMLError = OSError

    def __init__(self, *, is_lost=False):
        self.is_lost = is_lost

    def nvmlInit(self): ...

    def nvmlShutdown(self): ...

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.is_lost:
            raise OSError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=138 * 2**30, total=139 * 2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=7, usedGpuMemory=100 * 2**30), SimpleNamespace(pid=8, usedGpuMemory=None)]


@pytest.mark.parametrize(
    ("own", "is_lost", "verdict", "said"),
    [
        ({7: "server-0", 8: "trainer"}, False, OK, "server-0 (7) 100.0 GiB; trainer (8) 0.0 GiB"),
        ({7: "server-0"}, False, NOTE, "another (8) 0.0 GiB"),
        ({}, True, BAD, "NVML can't read them: GPU is lost"),
    ],
)
def test_who_holds_a_gpus_memory_is_told(paths, monkeypatch, own, is_lost, verdict, said):
    gpu = Gpu(name="GPU", memory=139 * 2**30, free=0)
    monkeypatch.setattr(machine_check, "find_hardware", lambda: SimpleNamespace(gpus=(gpu,), no_gpu=""))
    for module in (machine_check, hardware):
        monkeypatch.setattr(module, "pynvml", Nvml(is_lost=is_lost))
    monkeypatch.setattr(machine_check, "_own_pids", lambda subject: own)
    (finding,) = check_gpus(subject_of(paths))
    assert (finding.verdict, said in finding.said) == (verdict, True)


def test_a_gpu_that_was_asked_for_and_is_not_there_is_not_healthy(paths, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    paths.config.write_text("sglang: {device: cuda}\n")
    (finding,) = check_gpus(subject_of(paths))
    assert (finding.verdict, "sglang.device is cuda" in finding.said) == (BAD, True)
