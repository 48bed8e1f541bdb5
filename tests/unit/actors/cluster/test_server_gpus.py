"""The GPUs of a server: its own until one is set aside, then free ones, each held for as long as the server's actor."""

import asyncio
import os

import pytest

from actors.cluster.server_gpus import ServerGpus
from launcher.base.gpu_names import GpuName


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
