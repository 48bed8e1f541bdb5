"""Which GPUs a run sets aside after a server's end, and that a later attempt on the machine does without them."""

import os
import socket
import time

import pytest

from launcher.base.gpu_names import GpuName
from launcher.base.messages import ServerExit
from launcher.config.compose import compose
from launcher.resources.gpu_checks import name_gpus
from launcher.resources.gpu_quarantine import QUARANTINED, SECOND_ACCESS, QuarantineRecord, leave_out, to_quarantine
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths

ECC = "ended by itself with exit code -6: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
ACCESS = "ended by itself with exit code -6: CUDA error: an illegal memory access was encountered"
XID = "ended by itself with exit code -6: NVRM: Xid (PCI:0000:19:00): 79, GPU has fallen off the bus."
HERE = socket.gethostname()


def gpu(number, *, uuid="", fault="", host="a"):
    return GpuName(host=host, number=number, uuid=uuid, fault=fault)


def ended(reason, *gpus):
    return ServerExit(
        name="server-1", generation=0, pid=7, exit_code=-6, reason=reason, at=0.0, monotonic=0.0, gpus=gpus
    )


def journal_of(record):
    """A record that has read what was written of these."""
    read = QuarantineRecord()
    for one in record:
        read.take({"event": QUARANTINED, "reason": one.reason, **one.facts()})
    return read


@pytest.mark.parametrize("reason", [ECC, XID, ACCESS])
def test_a_fault_sets_its_gpu_aside_with_the_reason(reason):
    (found,), why_not = to_quarantine(ended(reason, gpu("3", uuid="GPU-x")), ())
    assert (str(found.gpu), found.server, why_not) == ("GPU 3 of a", "server-1", "")
    assert "GPU" in found.reason
    assert journal_of([found]).gpus == [found], "as it is read again"


def test_an_end_for_another_reason_sets_none_aside():
    assert to_quarantine(ended("ended by itself with exit code -9 (SIGKILL)", gpu("3")), ()) == ((), "")
    assert to_quarantine(ended("torch.OutOfMemoryError: CUDA out of memory", gpu("3")), ()) == ((), "")


def test_of_several_gpus_the_one_that_nvml_names_else_all():
    found, _ = to_quarantine(ended(ECC, gpu("0"), gpu("1", fault="3 uncorrectable memory (ECC) errors")), ())
    assert [(one.gpu.number, one.reason) for one in found] == [("1", "3 uncorrectable memory (ECC) errors (server-1)")]
    found, _ = to_quarantine(ended(ECC, gpu("0"), gpu("1")), ())
    assert [one.gpu.number for one in found] == ["0", "1"]


def test_what_is_set_aside_is_not_again():
    known, _ = to_quarantine(ended(ECC, gpu("0")), ())
    assert to_quarantine(ended(ECC, gpu("0")), known) == ((), "")


def test_a_second_illegal_access_is_a_kernels_unless_nvml_names_the_gpu():
    known, _ = to_quarantine(ended(ACCESS, gpu("0")), ())
    assert to_quarantine(ended(ACCESS, gpu("1")), known) == ((), SECOND_ACCESS)
    assert to_quarantine(ended(ECC, gpu("1")), known)[0], "another fault than that"
    assert to_quarantine(ended(ACCESS, gpu("1", fault="GPU 1 can't be read")), known)[0]


def test_a_gpu_is_known_by_its_uuid_and_else_by_its_number():
    assert gpu("0", uuid="GPU-x").is_same(gpu("2", uuid="GPU-x")), "numbered anew after a restart"
    assert not gpu("0", uuid="GPU-x").is_same(gpu("0", uuid="GPU-y")), "it was replaced"
    assert gpu("0").is_same(gpu("0", uuid="GPU-x")), "it could not be read"
    assert not gpu("0").is_same(gpu("0", host="b"))


def test_nvml_names_a_gpu_and_its_defect(gpus):
    gpus(gpus=8, ecc="5", lost="2")
    sound, broken, lost = name_gpus(["0", "5", "2"])
    assert (sound.host, sound.number, sound.fault, bool(sound.uuid)) == (HERE, "0", "", True)
    assert "3 uncorrectable memory (ECC) errors" in broken.fault
    assert "GPU is lost" in lost.fault


# ── a later attempt ──


@pytest.fixture
def config(tmp_path, gpus, monkeypatch):
    gpus(gpus=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")  # set again here, so that it is put back after the test
    whole = ("sglang.gpu_fraction=1", "actor.gpu_fraction=1")
    composed = compose(["conf=gsm8k_h200", f"cluster.fileroot={tmp_path}", *whole])
    paths = RunPaths.of(composed)
    paths.prepare()
    journal = Journal(paths.events, 1, time.time)
    (set_aside,), _ = to_quarantine(ended(ECC, name_gpus(["1"])[0]), ())
    journal.record(QUARANTINED, subject=str(set_aside.gpu), reason=set_aside.reason, **set_aside.facts())
    return composed


def test_a_later_attempt_leaves_it_out_and_says_so(config):
    (note,) = leave_out(config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert f"GPU 1 of {HERE}: its GPU reports a fault" in note
    assert "recovery.quarantine_gpus=false" in note
    assert leave_out(config) == (), "it is hidden already"


def test_it_is_used_and_that_is_said_where_the_run_needs_it(config):
    config.sglang.n_servers = 2
    (note,) = leave_out(config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,3"
    assert "does not fit on the 2 other GPUs" in note


def test_the_operator_may_use_it_again(config):
    config.recovery.quarantine_gpus = False
    assert leave_out(config) == ()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,3"


def test_the_journal_keeps_what_it_takes_to_find_it_again(config):
    (event,) = read_lines(RunPaths.of(config).events)
    assert event["uuid"].startswith("GPU-")
    assert {key: event[key] for key in ("host", "gpu", "server", "access")} == {
        "host": HERE,
        "gpu": "1",
        "server": "server-1",
        "access": False,
    }
