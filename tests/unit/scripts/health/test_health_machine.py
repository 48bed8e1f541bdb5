"""The machine is looked at as it is; who holds a GPU's memory is told, and one that is lost."""

import pynvml
import pytest

from scripts.health import machine_check
from scripts.health.findings import ABSENT, BAD, NOTE, OK, UNKNOWN
from scripts.health.machine_check import check_gpus, check_memory
from tests.support.health_parts import subject_of


def test_this_machine_can_be_looked_at(paths):
    memory, kills = check_memory(subject_of(paths))
    assert memory.facts["used_bytes"] > 0
    assert kills.subject == "kills for memory"
    gpus = check_gpus(subject_of(paths))
    assert {finding.level for finding in gpus} <= {OK, NOTE, ABSENT}


@pytest.mark.parametrize(
    ("own", "is_lost", "verdict", "said"),
    [
        ({7: "server-0", 8: "trainer"}, False, OK, "server-0 (7) 100.0 GiB; trainer (8) 0.0 GiB"),
        ({7: "server-0"}, False, NOTE, "another (8) 0.0 GiB"),
        ({}, True, BAD, "no GPU here: GPU 0 can't be read (GPU is lost)"),
    ],
)
def test_who_holds_a_gpus_memory_is_told(paths, monkeypatch, gpus, own, is_lost, verdict, said):
    gpus(gpus=1, memory_gib=139, busy="0", holders="7:100,8:0", lost="0" if is_lost else "")
    monkeypatch.setattr(machine_check, "_own_pids", lambda subject: own)
    (finding,) = check_gpus(subject_of(paths))
    assert (finding.level, said in finding.text) == (verdict, True)


def test_a_gpu_that_was_asked_for_and_is_not_there_is_not_healthy(paths, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    paths.config.write_text("sglang: {device: cuda}\n")
    (finding,) = check_gpus(subject_of(paths))
    assert (finding.level, "sglang.device is cuda" in finding.text) == (BAD, True)


@pytest.mark.parametrize(
    ("error", "level"), [(pynvml.NVML_ERROR_UNKNOWN, UNKNOWN), (pynvml.NVML_ERROR_GPU_IS_LOST, BAD)]
)
def test_gpus_that_nvml_does_not_tell_of_are_not_known(paths, monkeypatch, gpus, error, level):
    """They were told as bad, as a lost one is."""
    gpus(gpus=1)

    def refuse(handle):
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    (finding,) = check_gpus(subject_of(paths))
    assert finding.level is level
