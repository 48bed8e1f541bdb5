"""A CUDA toolkit in the usual layout, made of the pip packages' own; a kernel is really built with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.compose import REPOSITORY
from launcher.resources import toolchain
from launcher.resources.toolchain import find_toolkit, find_wheel_toolkit, make_cuda_home, server_tools
from tests.support.machine import scaled

KERNEL = """
#include <cuda_runtime.h>
__global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }
extern "C" int run(float* x) { twice<<<1, 32>>>(x); return cudaGetLastError(); }
"""
NOWHERE = Path("/nowhere")


@pytest.fixture
def wheel():
    found = find_wheel_toolkit()
    if found is None:
        pytest.skip("no CUDA compiler among the installed packages")
    return found


@pytest.mark.slow
def test_a_kernel_is_built_where_no_toolkit_is_installed(wheel, tmp_path, monkeypatch):
    """As SGLang's build tools do it: `nvcc` of CUDA_HOME compiles, the host's linker takes its lib64."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "bin").mkdir()
    for name in ("gcc", "g++", "cc", "c++", "as", "ld", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    inherited = {"PATH": str(tmp_path / "bin")}
    assert find_toolkit(inherited, NOWHERE) is None
    tools = server_tools(inherited, installed=NOWHERE)
    home = Path(tools["CUDA_HOME"])
    (tmp_path / "k.cu").write_text(KERNEL)
    words = [
        home / "bin/nvcc",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-Xcompiler",
        "-fPIC",
        "-c",
        "k.cu",
        "-o",
        "k.o",
    ]
    subprocess.run(words, cwd=tmp_path, env=tools, check=True, capture_output=True)
    words = [tmp_path / "bin/c++", "-shared", "k.o", f"-L{home / 'lib64'}", "-lcudart", "-o", "k.so"]
    subprocess.run(words, cwd=tmp_path, env=tools, check=True, capture_output=True)
    needed = subprocess.run(["readelf", "-d", "k.so"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "libcudart.so.13" in needed


HIDDEN = 'mount -t tmpfs none /usr/local || exit 77; exec "$@"'


@pytest.mark.slow
@pytest.mark.parametrize(("has_tools", "said"), [(True, "[]"), (False, "AssertionError")])
def test_sglangs_server_is_imported_as_on_an_h200_with_the_wheels_own_toolkit_alone(wheel, tmp_path, has_tools, said):
    """Hopper's kernels assert at their import that there is a CUDA_HOME. What is installed is hidden; needs root."""
    pytest.importorskip("sglang")
    if Path(sys.executable).resolve().is_relative_to("/usr/local"):
        pytest.skip("this Python would be hidden too")
    inherited = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    tools = server_tools(inherited, installed=NOWHERE) if has_tools else {}
    words = [sys.executable, "-m", "tests.programs.fake_cuda", "H200", "[]", "import"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", HIDDEN, "sh", *words],
        env={**inherited, **tools},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    if done.returncode in (1, 77) and not done.stdout and "Traceback" not in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr[-200:]}")
    assert said in (done.stdout if has_tools else done.stderr).splitlines()[-1], done.stderr[-2000:]


def test_the_folder_stays_the_same_and_belongs_to_this_user(wheel, tmp_path):
    home = make_cuda_home(wheel, tmp_path)
    assert home.stat().st_mode & 0o77 == 0
    before = {file: file.lstat().st_ino for file in home.rglob("*")}
    assert make_cuda_home(wheel, tmp_path) == home
    assert {file: file.lstat().st_ino for file in home.rglob("*")} == before
    (home / "lib64/libcudart.so").unlink()
    (home / "lib64/libcudart.so").symlink_to(NOWHERE)
    make_cuda_home(wheel, tmp_path)
    assert (home / "lib64/libcudart.so").exists()


def test_the_drivers_own_library_is_found_by_the_linker(wheel, tmp_path, monkeypatch):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver/libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "driver"))
    home = make_cuda_home(wheel, tmp_path)
    assert (home / "lib64/stubs/libcuda.so").resolve() == tmp_path / "driver/libcuda.so.1"


@pytest.mark.parametrize("name", toolchain.VARIABLES)
def test_a_toolkit_that_is_there_is_left_alone(tmp_path, name):
    assert find_toolkit({name: str(tmp_path)}, NOWHERE) == tmp_path
    assert "CUDA_HOME" not in server_tools({name: str(tmp_path)}, installed=NOWHERE)
    assert find_toolkit({"PATH": ""}, tmp_path) == tmp_path


def test_programs_of_an_environment_that_is_not_activated_are_found():
    path = server_tools({"PATH": "/usr/bin", "CUDA_HOME": "/cuda"})["PATH"].split(os.pathsep)
    assert path == [str(Path(toolchain.sys.executable).parent), "/usr/bin"]
