"""A CUDA toolkit in the usual layout, made of the pip packages' own; a kernel is really built with it."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from launcher.config.compose import REPOSITORY
from launcher.resources import toolchain
from launcher.resources.toolchain import find_toolkit, find_wheel_toolkit, make_cuda_home, server_tools, why_no_toolkit
from tests.support.machine import need_programs, scaled

KERNEL = """
#include <cuda_runtime.h>
__global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }
extern "C" int run(float* x) { twice<<<1, 32>>>(x); return cudaGetLastError(); }
"""
NOWHERE = Path("/nowhere")
TOOLS = ("gcc", "g++", "cc", "c++", "as", "ld", "sh")


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
    need_programs(*TOOLS, "readelf")
    for name in TOOLS:
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
    home = make_cuda_home(wheel, wheel / "lib", tmp_path)
    assert home.stat().st_mode & 0o77 == 0
    before = {file: file.lstat().st_ino for file in home.rglob("*")}
    assert make_cuda_home(wheel, wheel / "lib", tmp_path) == home
    assert {file: file.lstat().st_ino for file in home.rglob("*")} == before
    (home / "lib64/libcudart.so").unlink()
    (home / "lib64/libcudart.so").symlink_to(NOWHERE)
    make_cuda_home(wheel, wheel / "lib", tmp_path)
    assert (home / "lib64/libcudart.so").exists()


def test_the_drivers_own_library_is_found_by_the_linker(wheel, tmp_path, monkeypatch):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver/libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "driver"))
    home = make_cuda_home(wheel, wheel / "lib", tmp_path)
    assert (home / "lib64/stubs/libcuda.so").resolve() == tmp_path / "driver/libcuda.so.1"


def toolkit(folder, libraries="lib64"):
    """What a toolkit is known by: its compiler, and the library that every kernel is linked with."""
    for file in ("bin/nvcc", f"{libraries}/libcudart.so", f"{libraries}/../include/cuda.h"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch(0o755)
    return folder


@pytest.fixture
def no_wheel(monkeypatch):
    monkeypatch.setattr(toolchain, "find_wheel_toolkit", lambda: None)


@pytest.mark.parametrize("name", toolchain.VARIABLES)
def test_a_toolkit_that_is_named_is_the_servers(tmp_path, name):
    named = toolkit(tmp_path / "named")
    assert find_toolkit({name: str(named)}, toolkit(tmp_path / "other")) == named
    assert server_tools({name: str(named)}, installed=NOWHERE)["CUDA_HOME"] == str(named)
    assert why_no_toolkit({name: str(named)}) == ""


def test_the_toolkit_of_the_nvcc_on_path_is_the_servers(tmp_path):
    of_path = toolkit(tmp_path / "of path")
    inherited = {"PATH": str(of_path / "bin")}
    assert find_toolkit(inherited, toolkit(tmp_path / "other")) == of_path
    assert server_tools(inherited, installed=NOWHERE)["CUDA_HOME"] == str(of_path)


def test_an_installed_toolkit_is_handed_to_the_server_too(tmp_path):
    installed = toolkit(tmp_path / "cuda")
    assert server_tools({"PATH": ""}, installed=installed)["CUDA_HOME"] == str(installed)


def test_a_wrapper_is_no_toolkit(tmp_path, no_wheel):
    """A script in /usr/local/bin: there is no library beside it, and every kernel failed to link."""
    installed = toolkit(tmp_path / "cuda")
    wrapper = tmp_path / "usr/bin/nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {installed}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    inherited = {"PATH": str(wrapper.parent)}
    assert find_toolkit(inherited, installed) == installed
    assert server_tools(inherited, installed=installed)["CUDA_HOME"] == str(installed)
    assert find_toolkit(inherited, NOWHERE) is None
    assert "CUDA_HOME" not in server_tools(inherited, installed=NOWHERE)
    assert why_no_toolkit(inherited, NOWHERE) == (
        f"there is no CUDA toolkit, nor that of the pip packages ({tmp_path / 'usr'} has no lib64/libcudart.so)"
    )


def test_behind_a_wrapper_alone_the_pip_packages_own_is_used(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/nvcc").touch(0o755)
    home = Path(server_tools({"PATH": str(tmp_path / "usr/bin")}, installed=NOWHERE)["CUDA_HOME"])
    assert (home / "lib64/libcudart.so").exists()
    assert (home / "bin/nvcc").exists()


def test_a_toolkit_with_its_libraries_by_target_is_given_the_usual_layout(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    conda = toolkit(tmp_path / "conda", "targets/x86_64-linux/lib")
    assert find_toolkit({"PATH": str(conda / "bin")}, NOWHERE) == conda
    home = Path(server_tools({"PATH": str(conda / "bin")}, installed=NOWHERE)["CUDA_HOME"])
    assert home != conda
    for file in ("bin/nvcc", "lib64/libcudart.so", "include/cuda.h"):
        assert (home / file).exists()


@pytest.mark.parametrize("lacking", ["bin/nvcc", "lib64/libcudart.so"])
def test_a_named_toolkit_that_can_not_build_is_refused_by_what_it_lacks(tmp_path, lacking):
    named = toolkit(tmp_path / "named")
    (named / lacking).unlink()
    assert why_no_toolkit({"CUDA_HOME": str(named)}) == f"CUDA_HOME={named} has no {lacking}"


def test_packages_without_a_library_to_link_with_are_no_toolkit(tmp_path, monkeypatch):
    (tmp_path / "nvidia/cuda_nvcc/bin").mkdir(parents=True)
    (tmp_path / "nvidia/cuda_nvcc/bin/nvcc").touch(0o755)
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path / "nvidia"))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda _: spec)
    assert find_wheel_toolkit() is None
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libcudart.so.13").touch()
    shutil.copytree(tmp_path / "nvidia/cuda_nvcc/bin", tmp_path / "nvidia/cu13/bin")
    assert find_wheel_toolkit() == tmp_path / "nvidia/cu13"


def test_programs_of_an_environment_that_is_not_activated_are_found():
    path = server_tools({"PATH": "/usr/bin", "CUDA_HOME": "/nowhere"})["PATH"].split(os.pathsep)
    assert path == [str(Path(toolchain.sys.executable).parent), "/usr/bin"]
