"""The GPUs of a server: its own until one is set aside, then free ones, each held for as long as the server's actor."""

import asyncio
import os

import pytest

from actors.cluster.server_gpus import ServerGpus
from launcher.base.gpu_names import GpuName
from launcher.base.messages import ServerExit
from launcher.resources.gpu_quarantine import to_quarantine


def named(numbers):
    return tuple(GpuName(host="a", number=number) for number in numbers)


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


class Node:
    """Free GPUs are given out one by one, and kept by whom they were given to."""

    def __init__(self, *free):
        self.free = list(free)

    def hold(self):
        return (object(), self.free.pop(0)) if self.free else None


def chosen(gpus, *avoid):
    return asyncio.run(gpus.choose(named(avoid)))


def test_a_server_keeps_its_own_while_none_is_set_aside():
    node = Node("1")
    assert chosen(ServerGpus(("0",), hold=node.hold, name=named)) == ("0",)
    assert chosen(ServerGpus(("0",), hold=node.hold, name=named), "3") == ("0",), "another server's"
    assert node.free == ["1"], "nothing is reserved for it"


def test_it_gets_a_free_one_and_never_one_that_is_set_aside():
    node = Node("1", "2", "3")
    gpus = ServerGpus(("0",), hold=node.hold, name=named)
    assert chosen(gpus, "0", "1") == ("2",)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert node.free == ["3"], "the first is held too, so that nobody else gets it"
    assert chosen(gpus, "0", "1") == ("2",), "no further one for each start"
    assert chosen(gpus, "0", "1", "2") == ("3",)


def test_a_server_over_several_keeps_those_that_are_sound():
    node = Node("4", "5")
    gpus = ServerGpus(("0", "1"), hold=node.hold, name=named)
    assert chosen(gpus, "1") == ("0", "4")
    assert chosen(gpus, "0", "1") == ("4", "5")


def test_where_none_is_free_it_goes_on_with_its_own():
    gpus = ServerGpus(("0", "1"), hold=Node("4").hold, name=named)
    assert chosen(gpus, "0", "1") == ("0", "1")
    assert chosen(gpus, "0") == ("1", "4"), "what it reserved in vain serves later"


def test_on_the_cpu_nothing_is_asked():
    def hold():
        raise AssertionError

    assert chosen(ServerGpus((), hold=hold, name=named), "0") == ()


# ── an end, with what NVML says of the GPUs ──


def ended(*, was_told=False, reason="ended by itself with exit code -6"):
    return ServerExit(
        name="server-0", generation=0, pid=7, exit_code=-6, reason=reason, at=0.0, monotonic=0.0, was_told=was_told
    )


def explained(monkeypatch, end, own=("0", "2"), **happens):
    """What is made of an end of a server on GPUs 0 and 2, during which this happened."""

    async def live():
        gpus = ServerGpus(own)
        await gpus.watch()
        for name, value in happens.items():
            monkeypatch.setenv(f"NVML_{name.upper()}", value)
        return await gpus.explained(end)

    return asyncio.run(live())


def test_an_xid_error_blames_its_gpu_and_that_one_is_set_aside(gpus, monkeypatch):
    gpus(gpus=4)
    end = explained(monkeypatch, ended(), xids="2:95,0:45")
    assert [(gpu.number, gpu.fault) for gpu in end.gpus] == [("0", ""), ("2", "Xid 95")]
    (aside,), _ = to_quarantine(end, ())
    assert (aside.gpu.number, aside.reason) == ("2", "Xid 95 (server-0)")


def test_a_gpu_that_is_lost_is_the_cause_without_a_word_in_the_log(gpus, monkeypatch):
    gpus(gpus=4)
    end = explained(monkeypatch, ended(), lost="2", xids="2:79")
    assert "GPU 2 can't be read (GPU is lost) | NVML reports Xid 79 of a GPU that can't be read" in end.reason
    assert [gpu.number for gpu in end.gpus if gpu.fault] == ["2"]


def test_an_end_without_a_fault_says_what_is_not_known(gpus, monkeypatch):
    gpus(gpus=4, no_events="2")
    end = explained(monkeypatch, ended())
    assert end.reason == "ended by itself with exit code -6 | Xid errors of GPU 2 are not known (Not Supported)"
    assert end.gpus == ()


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
    (first, second) = first, await gpus.explained(ended())
    assert "NVML reports Xid 79 of GPU 0" in first.reason
    assert second == ended()
