"""Xid errors through NVML's events and its real binding: whose they are, whom they blame, where none can be known."""

import pytest

from launcher.base.messages import Cause
from launcher.policy.exit_cause import find_server_cause
from launcher.resources.gpu_events import XidWatch, describe_xids, hardware_xids


@pytest.fixture
def watched(gpus, monkeypatch):
    """A watch of GPUs 0 and 2 of four, which all have had errors; call it with what happens to them next."""
    gpus(gpus=4, xids="2:48,0:79")
    watch = XidWatch(["0", "2"])

    def happens(xids="", **answers):
        monkeypatch.setenv("NVML_XIDS", f"2:48,0:79,{xids}")
        for name, value in answers.items():
            monkeypatch.setenv(f"NVML_{name.upper()}", value)
        return watch

    yield happens
    watch.close()


def test_errors_are_those_of_its_gpus_since_it_began(watched):
    assert watched().seen() == {}, "what was before is forgotten"
    assert watched("2:79,1:79,0:31").seen() == {"2": [79], "0": [31]}, "GPU 1 is another server's"
    watch = watched("2:79,1:79,0:31,2:154")
    assert watch.seen() == {"2": [79, 154], "0": [31]} == watch.seen(), "however often it is asked"
    assert watch.unknown == {}


def test_a_gpu_that_fell_off_the_bus_keeps_its_error(watched):
    watch = watched("2:79,0:43", lost="2")
    assert watch.seen() == {"": [79], "0": [43]}
    assert "NVML reports Xid 79 of a GPU that can't be read" in describe_xids(watch.seen(), watch.unknown)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"no_events": "0"}, "Not Supported"),
        ({"lost": "0"}, "GPU 0 can't be read (GPU is lost)"),
        ({"no_driver": "1"}, "Driver Not Loaded"),
        ({"gpus": "0"}, "NVML finds no such GPU"),
        ({"old_events": "1"}, "Function Not Found"),
    ],
)
def test_where_there_are_no_events_nothing_is_known(gpus, answers, why):
    gpus(**({"gpus": 1} | answers))
    watch = XidWatch(["0"])
    assert (watch.seen(), watch.unknown) == ({}, {"0": why})
    (line,) = describe_xids(watch.seen(), watch.unknown)
    assert line == f"Xid errors of GPU 0 are not known ({why})"
    watch.close()
    assert find_server_cause([line.replace(why, "")], -6).cause is Cause.SERVER_CRASH, "not known is no fault"


def test_errors_that_programs_give_blame_no_gpu():
    assert hardware_xids([31, 79, 79, 999, 154, 43]) == "Xid 79, 154"
    (line,) = describe_xids({"0": [31, 999]}, {})
    assert line == "NVML saw Xid 31, 999 of GPU 0, which a defect of a program gives too"
    assert find_server_cause([line], -6).cause is Cause.SERVER_CRASH


def test_an_error_explains_a_crash_and_not_memory_that_ran_out():
    (line,) = describe_xids({"0": [119]}, {})
    assert find_server_cause(["Scheduler hit an exception: Traceback", line], 1).cause is Cause.GPU_FAULT
    assert find_server_cause(["watchdog timeout", line], 1).cause is Cause.GPU_FAULT
    assert find_server_cause(["torch.OutOfMemoryError: CUDA out of memory", line], 1).cause is Cause.SERVER_OOM
