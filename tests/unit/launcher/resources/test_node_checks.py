"""What a node has beside its GPUs: packages, compilers, variables, shared memory."""

import contextlib
import importlib.metadata
import math
import os
import shutil
import tomllib
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from launcher.base.findings import Severity
from launcher.config.compose import REPOSITORY
from launcher.resources import hardware, node_checks, toolchain
from launcher.resources.hardware import room_for_processes
from launcher.resources.memory_estimate import GIB
from launcher.resources.node_checks import (
    SGLANG,
    check_caches,
    check_node,
    check_packages,
    check_processes,
    check_shared_memory,
    check_tools,
    check_variables,
    missing_on_node,
    torch_build,
)
from tests.support.composed import composed


def of(checks):
    return {check.subject: check for check in checks}


def test_the_installed_pair_is_named_and_fits():
    (packages,) = check_packages()
    assert packages.text.startswith("sglang 0.")
    assert (packages.level, packages.hint) == (Severity.OK, "")
    assert torch_build()[1] is None


@pytest.mark.parametrize(
    ("build", "said"),
    [((None, "7.0"), "(ROCm 7.0)"), ((None, None), "(no CUDA)")],
)
def test_a_torch_for_other_devices_stops_runs_on_a_gpu(monkeypatch, build, said):
    monkeypatch.setattr(node_checks, "torch_build", lambda: build)
    (packages,) = check_packages()
    assert (packages.level, said in packages.text) == (Severity.GPU, True)


def test_packages_that_are_not_there(monkeypatch):
    monkeypatch.setattr(node_checks, "_version", lambda package: None if package == "sglang" else "2.0")
    (packages,) = check_packages()
    assert (packages.level, packages.text) == (Severity.BAD, "sglang not installed")


def test_versions_that_do_not_belong_together(monkeypatch):
    monkeypatch.setattr(node_checks, "_version", {"sglang": "0.5.17", "torch": "2.5.0"}.get)
    (packages,) = check_packages()
    assert "this SGLang requires torch==" in packages.text
    assert packages.hint


@pytest.mark.parametrize(
    ("installed", "stops"),
    [
        *((version, Severity.BAD) for version in ("0.5.16", "0.5.18", "0.5.23", "0.6.0")),
        *((version, Severity.OK) for version in ("0.5.17", "0.5.17.post1", "0.5.17+cu130")),
    ],
)
def test_a_run_starts_with_the_sglang_that_it_was_written_for_alone(installed, stops, monkeypatch):
    """Another version passed every check: its servers take weights and stream tokens otherwise."""
    own_torch = importlib.metadata.version("torch")
    monkeypatch.setattr(node_checks, "_version", {"sglang": installed, "torch": own_torch}.get)
    (packages,) = check_packages()
    assert packages.level is stops
    if packages.stops:
        assert f"sglang {installed} with torch" in packages.text
        assert packages.text.endswith(f": the launcher works with sglang{SGLANG} alone")
        assert packages.hint == "pip install -c constraints.txt -e ."


def test_the_package_requires_the_sglang_that_a_run_is_started_with():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (required,) = (Requirement(one) for one in project["dependencies"] if Requirement(one).name == "sglang")
    assert required.specifier == SGLANG


# ── what compiles ──


@pytest.fixture
def bare(tmp_path):
    """Variables with which no program of this machine is found."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin")}


def test_a_slim_image_lacks_compilers(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "python_header", lambda: tmp_path / "Python.h")
    environment = tmp_path / "environment"
    environment.mkdir()
    (environment / "ninja").touch(mode=0o755)
    monkeypatch.setattr(toolchain.sys, "executable", str(environment / "python"))
    checks = of(check_tools(bare))
    assert {name for name, check in checks.items() if check.level is Severity.GPU} == {
        "C++ compiler",
        "C compiler",
        "Python.h",
    }
    assert checks["Python.h"].hint.startswith("apt-get install python3.")
    assert checks["ninja"].text.endswith("environment/ninja"), "this environment's own, which need not be activated"
    (environment / "ninja").unlink()
    assert of(check_tools(bare))["ninja"].hint == "pip install ninja"


def test_a_toolkit_that_is_named_and_not_there(bare, tmp_path):
    check = of(check_tools({**bare, "CUDA_HOME": str(tmp_path / "cuda")}))["CUDA toolkit"]
    assert (check.level, check.text) == (Severity.GPU, f"CUDA_HOME={tmp_path / 'cuda'} has no bin/nvcc")
    assert check.hint.startswith("unset CUDA_HOME")


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"HOME": "/dev/null/nobody"}, 5),
        ({"HOME": "/dev/null/nobody", "TRITON_HOME": "{}", "FLASHINFER_WORKSPACE_BASE": "{}"}, 3),
        ({"HOME": "{}", "SGLANG_CACHE_DIR": "/dev/null/nobody"}, 1),
        ({"HOME": "{}/not/yet/there"}, 0),
    ],
)
def test_a_home_that_may_not_be_written_has_no_place_for_kernels(tmp_path, variables, refused):
    check = check_caches({name: value.format(tmp_path) for name, value in variables.items()})
    assert check.level is (Severity.GPU if refused else Severity.OK)
    assert check.text.count("can't be made") == refused
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"


def test_triton_itself_stops_where_the_check_does(monkeypatch, tmp_path):
    made_by = pytest.importorskip("triton.runtime.cache").FileCacheManager  # comes with torch, where there is one
    for home, holds in (("/dev/null/nobody", False), (str(tmp_path), True)):
        monkeypatch.setenv("TRITON_HOME", home)
        assert (".triton" in check_caches(os.environ).text) is not holds
        with contextlib.nullcontext() if holds else pytest.raises(OSError, match="nobody"):
            made_by("0123abcd")


# ── the surroundings ──


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({node_checks.KEEPS_GPUS: "1"}, "two take the same one"),
        ({"LOCAL_RANK": "0"}, "as under torchrun"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "otherwise than NVML"),
    ],
)
def test_variables_of_other_launchers(variables, said):
    (check,) = check_variables(variables)
    assert (check.level, said in check.text) == (Severity.GPU, True)
    assert check.hint.startswith("unset ")


def test_variables_that_do_no_harm():
    harmless = {node_checks.KEEPS_GPUS: "0", "RANK": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert list(check_variables(harmless)) == []


def test_room_for_nccl(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=GIB // 16, free=GIB // 16))
    check = check_shared_memory()
    assert (check.level, check.text) == (Severity.SEVERAL, "0.06 of 0.06 GiB free; NCCL needs 1 GiB")
    one = composed("conf=gsm8k_h200")
    several = composed("conf=gsm8k_h200_cluster")
    assert list(missing_on_node(one, ("cuda", "cuda"), [check])) == []
    assert "--shm-size" in str(next(missing_on_node(several, ("cuda", "cuda"), [check])))


def test_no_shared_memory_at_all(tmp_path):
    assert check_shared_memory(tmp_path / "shm").level is Severity.SEVERAL


def test_looking_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = dict(os.environ)
    assert check_node()
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


# ── processes ──


@pytest.mark.parametrize(
    ("room", "limit", "stops"),
    [
        (float("inf"), "", Severity.OK),
        (400, "ulimit -u is 4096", Severity.OK),
        (399, "ulimit -u is 4096", Severity.BAD),
    ],
)
def test_room_for_the_processes_of_a_run(room, limit, stops):
    """Without it Ray aborts, with a page of addresses and no word for a person."""
    check = check_processes(room, limit)
    assert (check.level, limit in check.text) == (stops, True)
    assert bool(check.hint) is (stops is Severity.BAD)


def test_the_tightest_limit_of_processes_is_found(tmp_path, monkeypatch):
    inner = tmp_path / "cgroup" / "slurm" / "job"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/slurm/job\n")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert room_for_processes(tmp_path / "cgroup", own) == (math.inf, "")

    (inner / "pids.max").write_text("max\n")
    (inner.parent / "pids.max").write_text("512\n")
    (inner.parent / "pids.current").write_text("400\n")
    assert room_for_processes(tmp_path / "cgroup", own) == (112, f"{inner.parent}/pids.max is 512")

    monkeypatch.setattr(os, "getuid", lambda: 54321)  # nobody's
    monkeypatch.setattr(hardware.resource, "getrlimit", lambda _: (100, 100))
    assert room_for_processes(tmp_path / "cgroup", own) == (100, "ulimit -u is 100")
