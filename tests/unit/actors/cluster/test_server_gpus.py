"""The end of a server, with what NVML says of its GPUs: a fault of one is its cause, and is named."""

import asyncio

from actors.cluster.server_gpus import ServerGpus
from launcher.base.messages import Cause, ServerExit
from launcher.policy.exit_cause import find_server_cause


def ended(*, was_told=False, reason="ended by itself with exit code -6"):
    return ServerExit(name="server-0", generation=0, pid=7, exit_code=-6, reason=reason, age_s=0.0, was_told=was_told)


def explained(monkeypatch, end, own=("0", "2"), **happens):
    """What is made of an end of a server on GPUs 0 and 2, during which this happened."""

    async def live():
        gpus = ServerGpus(own)
        await gpus.watch()
        for name, value in happens.items():
            monkeypatch.setenv(f"NVML_{name.upper()}", value)
        return await gpus.explained(end)

    return asyncio.run(live())


def cause_of(end):
    return find_server_cause(end.reason.split(" | "), end.exit_code).cause


def test_an_xid_error_names_its_gpu_as_the_cause(gpus, monkeypatch):
    gpus(gpus=4)
    end = explained(monkeypatch, ended(), xids="2:95,0:45")
    assert "NVML reports Xid 95 of GPU 2" in end.reason
    assert cause_of(end) is Cause.GPU_FAULT


def test_a_gpu_that_is_lost_is_the_cause_without_a_word_in_the_log(gpus, monkeypatch):
    gpus(gpus=4)
    end = explained(monkeypatch, ended(), lost="2", xids="2:79")
    assert "GPU 2 can't be read (GPU is lost) | NVML reports Xid 79 of a GPU that can't be read" in end.reason
    assert cause_of(end) is Cause.GPU_FAULT


def test_an_end_without_a_fault_says_what_is_not_known(gpus, monkeypatch):
    gpus(gpus=4, no_events="2")
    end = explained(monkeypatch, ended())
    assert end.reason == "ended by itself with exit code -6 | Xid errors of GPU 2 are not known (Not Supported)"
    assert cause_of(end) is not Cause.GPU_FAULT


def test_an_end_that_was_ordered_and_a_server_on_the_cpu_are_not_explained(gpus, monkeypatch):
    gpus(gpus=4)
    assert explained(monkeypatch, ended(was_told=True), xids="2:79") == ended(was_told=True)
    assert explained(monkeypatch, ended(), own=(), xids="2:79") == ended()


async def test_an_incarnation_is_not_blamed_for_what_was_before_it(gpus, monkeypatch):
    gpus(gpus=4)
    gpus = ServerGpus(("0",))
    await gpus.watch()
    monkeypatch.setenv("NVML_XIDS", "0:79")
    first = await gpus.explained(ended())
    await gpus.watch()
    second = await gpus.explained(ended())
    assert "NVML reports Xid 79 of GPU 0" in first.reason
    assert second == ended()
