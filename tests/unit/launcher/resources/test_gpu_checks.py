"""What NVIDIA's library says of a node's GPUs, through the real binding: each fault in one row, with its command."""

import pytest

from launcher.base.errors import ResourceError
from launcher.base.findings import Severity
from launcher.resources.gpu_checks import check_gpus
from launcher.resources.gpus import find_gpus, other_accelerators
from launcher.resources.hardware import find_hardware, memory_in_use
from launcher.resources.missing_files import find_shape
from launcher.resources.node_checks import missing_on_node
from launcher.resources.preflight import find_missing
from launcher.resources.run_plan import make_plan
from tests.support.composed import composed
from tests.support.preflight_parts import missing, the_one


def rows():
    return {check.subject: check for check in check_gpus("13.0")}


def test_eight_sound_gpus_are_one_row(gpus):
    gpus(gpus=8)
    assert {name: check.text for name, check in rows().items()} == {
        "driver": "580.95.05, for CUDA 13.0",
        "GPU 0-7": "NVIDIA H200, 140.0 GiB",
    }
    assert len(find_gpus().gpus) == 8


@pytest.mark.parametrize(
    ("answers", "name", "stops", "seen", "remedy"),
    [
        (
            {"cuda": 12080, "driver": "570.86.10"},
            "driver",
            Severity.GPU,
            "570.86.10, for CUDA 12.8: too old for torch, which is built for CUDA 13.0",
            "branch 580 or newer",
        ),
        ({"mig": "3"}, "GPU 3", Severity.GPU, "divided by MIG", "nvidia-smi -i 3 -mig 0"),
        ({"exclusive": "1"}, "GPU 1", Severity.SHARED, "EXCLUSIVE_PROCESS", "nvidia-smi -i 1 -c DEFAULT"),
        ({"prohibited": "1"}, "GPU 1", Severity.GPU, "PROHIBITED", "nvidia-smi -i 1 -c DEFAULT"),
        ({"lost": "2"}, "GPU 2", Severity.GPU, "GPU 2 can't be read (GPU is lost)", "nvidia-smi -i 2 -r"),
        ({"remap_failed": "0"}, "GPU 0", Severity.GPU, "could not be remapped", "have it replaced"),
        ({"remap_pending": "0"}, "GPU 0", Severity.NOTE, "waits to be remapped", "nvidia-smi -i 0 -r"),
        ({"ecc": "5"}, "GPU 5", Severity.NOTE, "3 uncorrectable memory (ECC) errors", "where they come back"),
        ({"busy": "4"}, "GPU 4", Severity.NOTE, "of which 100.0 are held (pids: 4242)", "end those processes"),
    ],
)
def test_a_fault_is_one_row_with_its_command(gpus, answers, name, stops, seen, remedy):
    gpus(gpus=8, **answers)
    check = rows()[name]
    assert (check.level, seen in check.text, remedy in check.hint) == (stops, True, True), check


def test_what_nvml_does_not_say_of_a_gpu_is_not_known_and_stops_no_run(gpus):
    """A GPU whose MIG mode could not be read was in the row of the sound ones."""
    gpus(gpus=3, silent="1")
    found = rows()
    assert found["GPU 0, 2"].level is Severity.OK
    assert (found["GPU 1"].level, found["GPU 1"].text) == (
        Severity.UNKNOWN,
        "not known: MIG mode (Unknown Error), compute mode (Unknown Error), defects of its memory (Unknown Error), "
        "memory (ECC) errors (Unknown Error)",
    )
    assert stopped(composed("conf=gsm8k_h200")) == []


def test_what_a_kind_of_gpu_does_not_have_is_no_answer_that_is_missing(gpus):
    gpus(gpus=1, name="no ECC")
    assert rows()["GPU 0"].level is Severity.OK


def test_a_driver_is_asked_for_the_version_that_torch_was_built_for(gpus):
    gpus(gpus=1, cuda=12080)
    assert [check.level for check in check_gpus("12.4")] == [Severity.OK, Severity.OK], "any 12.x will do"
    assert [check.level for check in check_gpus(None)] == [Severity.OK, Severity.OK], (
        "no CUDA in torch: nothing to compare"
    )


def test_a_driver_without_its_kernel_module(gpus):
    gpus(no_driver=1)
    assert "NVML finds no driver (Driver Not Loaded)" in rows()["GPU"].text
    assert rows()["GPU"].level is Severity.GPU


@pytest.mark.parametrize(
    ("error", "seen", "remedy"),
    [
        (4, "NVML does not answer (Insufficient Permissions)", "ls -l /dev/nvidia*"),
        (18, "NVML does not answer (RM has detected an NVML/RM version mismatch.)", "reboot"),
        (9, "NVML finds no driver (Driver Not Loaded)", "modprobe nvidia"),
        (12, "NVML finds no driver (NVML Shared Library Not Found)", "in a container: --gpus all"),
        (999, "NVML does not answer (Unknown Error)", "nvidia-smi"),
    ],
)
def test_a_driver_that_is_there_and_does_not_answer_is_not_called_missing(gpus, error, seen, remedy):
    gpus(gpus=2, init=error)
    assert (rows()["GPU"].level, rows()["GPU"].text, remedy in rows()["GPU"].hint) == (Severity.GPU, seen, True)


def test_a_gpu_that_shares_the_hosts_memory_is_not_called_broken(gpus):
    gpus(gpus=1, no_memory="0")
    assert rows()["GPU 0"].text == "GPU 0 can't be read (Not Supported)"
    assert "nvidia-smi" not in rows()["GPU 0"].hint
    assert "share the host's memory" in rows()["GPU 0"].hint


def test_a_fault_of_a_hidden_gpu_stops_nothing(gpus, monkeypatch):
    gpus(gpus=4, lost="3", mig="2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert list(rows()) == ["driver", "GPU 0, 1"]
    assert len(find_gpus().gpus) == 2


def test_a_part_of_a_gpu_is_named(gpus, monkeypatch):
    gpus(gpus=1, mig="0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1a2b")
    assert "CUDA_VISIBLE_DEVICES=MIG-1a2b is a part of a GPU (MIG)" in rows()["GPU"].text
    assert find_hardware().gpus == ()


def test_the_memory_of_the_others_is_read_while_one_gpu_is_lost(gpus):
    gpus(gpus=3, lost="1")
    assert [name for name in memory_in_use() if name.startswith("GPU")] == ["GPU 0 memory", "GPU 2 memory"]


# ── what it means for a run ──


def test_auto_does_not_take_the_cpu_beside_a_gpu_that_is_lost(gpus, config):
    gpus(gpus=2, lost="1")
    config.sglang.device = config.actor.device = "auto"
    message = the_one(config, ResourceError, find_hardware())
    assert "sglang.device=auto and actor.device=auto would take the CPU, but GPU 1 can't be read" in message
    config.sglang.device = config.actor.device = "cpu"
    assert missing(config, find_hardware()) == []


def test_a_run_is_told_what_mends_a_driver_that_refuses(gpus, config):
    gpus(gpus=1, init=18)
    config.sglang.device = config.actor.device = "cuda"
    here, checks = find_hardware(), tuple(check_gpus("13.0"))
    (error,) = find_missing(config, here, make_plan(config, here, find_shape(config)), checks)
    assert "but NVML does not answer (RM has detected an NVML/RM version mismatch.)" in error.message
    assert error.hint.startswith("the driver was upgraded")
    assert "; or run it on a machine with a GPU" in error.hint


def test_a_run_for_which_others_left_too_little_is_told_so(gpus, config):
    gpus(gpus=1, busy="0", memory_gib=101)
    config.sglang.device = config.actor.device = "cuda"
    config.sglang.gpu_fraction = config.actor.gpu_fraction = 0.5
    message = the_one(config, ResourceError, find_hardware())
    assert "1.0 GiB are there; other processes hold 100.0 GiB of it (`python -m launcher doctor` has" in message


def stopped(config, devices=("cuda", "cuda")):
    return [str(error) for error in missing_on_node(config, devices, tuple(check_gpus("13.0")))]


def test_exclusive_gpus_stop_only_runs_that_share_one(gpus):
    gpus(gpus=2, exclusive="0,1")
    shared = composed("conf=gsm8k_h200")
    assert [text.partition(":")[0] for text in stopped(shared)] == ["GPU 0", "GPU 1"]
    apart = composed("conf=gsm8k_h200", "sglang.gpu_fraction=1", "actor.gpu_fraction=1")
    assert stopped(apart) == []


def test_a_fault_of_a_gpu_stops_no_run_on_the_cpu(gpus):
    gpus(gpus=2, lost="0", cuda=12000)
    config = composed("conf=gsm8k_h200")
    assert len(stopped(config)) == 2
    assert stopped(config, ("cpu", "cpu")) == []


# ── others than NVIDIA's ──


def device(system, vendor, kind, device="0x74a1"):
    folder = system / "sys/bus/pci/devices" / f"0000:{len(list((system / 'sys/bus/pci/devices').glob('*'))):02x}:00.0"
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("vendor", "kind", "number", "is_open", "said"),
    [
        ("0x1002", "0x120000", "0x74a1", True, "an AMD GPU"),
        ("0x1002", "0x038000", "0x740f", True, "an AMD GPU"),
        ("0x1002", "0x030000", "0x1636", True, ""),
        ("0x1002", "0x120000", "0x74a1", False, ""),
        ("0x1ae0", "0x088000", "0x0063", False, "a Google TPU"),
        ("0x1ae0", "0x020000", "0x0042", False, ""),
        ("0x1da3", "0x120000", "0x1020", False, "an Intel Gaudi"),
        ("0x10de", "0x030200", "0x2335", False, ""),
    ],
)
def test_other_accelerators_are_known_by_what_the_kernel_lists(tmp_path, vendor, kind, number, is_open, said):
    """A processor's graphics, a network card and a GPU that no driver has opened are none."""
    device(tmp_path, vendor, kind, number)
    if is_open:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/kfd").touch()
    assert other_accelerators(tmp_path) == said


@pytest.mark.parametrize("setting", ["cuda", "auto"])
def test_a_machine_with_another_accelerator_says_what_is_supported(gpus, config, monkeypatch, setting):
    gpus(no_driver=1)
    monkeypatch.setattr("launcher.resources.gpus.other_accelerators", lambda: "an AMD GPU")
    config.sglang.device = config.actor.device = setting
    message = the_one(config, ResourceError, find_hardware())
    assert "here is an AMD GPU: only NVIDIA GPUs (CUDA) and the CPU are supported" in message
    assert rows()["GPU"].hint.startswith("only NVIDIA GPUs (CUDA) and the CPU are supported")
