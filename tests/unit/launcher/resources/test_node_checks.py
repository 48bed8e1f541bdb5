"""What a node has beside its GPUs: packages, compilers, variables, shared memory."""

import os
import shutil
from types import SimpleNamespace

import pytest

from launcher.config.compose import compose
from launcher.resources import node_checks, toolchain
from launcher.resources.gpu_checks import Stops
from launcher.resources.memory_estimate import GIB
from launcher.resources.node_checks import (
    check_node,
    check_packages,
    check_shared_memory,
    check_tools,
    check_variables,
    missing_on_node,
    torch_build,
)


def of(checks):
    return {check.name: check for check in checks}


def test_the_installed_pair_is_named_and_fits():
    (packages,) = check_packages()
    assert packages.seen.startswith("sglang 0.")
    assert (packages.stops, packages.remedy) == (Stops.NONE, "")
    assert torch_build()[1] is None


@pytest.mark.parametrize(
    ("build", "said"),
    [((None, "7.0"), "(ROCm 7.0)"), ((None, None), "(no CUDA)")],
)
def test_a_torch_for_other_devices_stops_runs_on_a_gpu(monkeypatch, build, said):
    monkeypatch.setattr(node_checks, "torch_build", lambda: build)
    (packages,) = check_packages()
    assert (packages.stops, said in packages.seen) == (Stops.GPU, True)


def test_packages_that_are_not_there(monkeypatch):
    monkeypatch.setattr(node_checks, "_version", lambda package: None if package == "sglang" else "2.0")
    (packages,) = check_packages()
    assert (packages.stops, packages.seen) == (Stops.EVERY, "sglang not installed")


def test_versions_that_do_not_belong_together(monkeypatch):
    monkeypatch.setattr(node_checks, "_version", {"sglang": "0.5.17", "torch": "2.5.0"}.get)
    (packages,) = check_packages()
    assert "this SGLang requires torch==" in packages.seen
    assert packages.remedy


# ── what compiles ──


@pytest.fixture
def bare(tmp_path):
    """Variables with which no program of this machine is found."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin")}


def test_a_slim_image_lacks_compilers(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "python_header", lambda: tmp_path / "Python.h")
    checks = of(check_tools(bare))
    assert {name for name, check in checks.items() if check.stops is Stops.GPU} == {
        "C++ compiler",
        "C compiler",
        "Python.h",
    }
    assert checks["Python.h"].remedy.startswith("apt-get install python3.")
    assert checks["ninja"].seen.endswith("bin/ninja"), "this environment's own, which need not be activated"


def test_a_toolkit_that_is_named_and_not_there(bare, tmp_path):
    check = of(check_tools({**bare, "CUDA_HOME": str(tmp_path / "cuda")}))["CUDA toolkit"]
    assert (check.stops, check.seen) == (Stops.GPU, f"{tmp_path / 'cuda'} has no bin/nvcc")
    assert check.remedy.startswith("unset CUDA_HOME")


# ── the surroundings ──


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({node_checks.KEEPS_GPUS: "1"}, "two take the same one"),
        ({"LOCAL_RANK": "0"}, "as under torchrun"),
    ],
)
def test_variables_of_other_launchers(variables, said):
    (check,) = check_variables(variables)
    assert (check.stops, said in check.seen) == (Stops.GPU, True)
    assert check.remedy.startswith("unset ")


def test_variables_that_do_no_harm():
    assert list(check_variables({node_checks.KEEPS_GPUS: "0", "RANK": "1"})) == []


def test_room_for_nccl(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=GIB // 16, free=GIB // 16))
    check = check_shared_memory()
    assert (check.stops, check.seen) == (Stops.SEVERAL, "0.06 of 0.06 GiB free; NCCL needs 1 GiB")
    one = compose(["conf=gsm8k_h200"])
    several = compose(["conf=gsm8k_h200_cluster"])
    assert list(missing_on_node(one, ("cuda", "cuda"), [check])) == []
    assert "--shm-size" in str(next(missing_on_node(several, ("cuda", "cuda"), [check])))


def test_no_shared_memory_at_all(tmp_path):
    assert check_shared_memory(tmp_path / "shm").stops is Stops.SEVERAL


def test_looking_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = dict(os.environ)
    assert check_node()
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before
