"""What compiles the kernels that SGLang builds on a GPU at their first use: CUDA's toolkit, ninja, compilers, headers.

pip installs a toolkit too, in a layout that no build tool knows: `nvcc` in a folder where nothing looks, libraries
without the names that a linker asks for. Where no other toolkit is found, `server_tools` makes a folder of links in the
usual layout, and gives it to the server as CUDA_HOME.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.base.private_folders import make_private

INSTALLED = Path("/usr/local/cuda")
VARIABLES = ("CUDA_HOME", "CUDA_PATH")
FOLDERS = ("bin", "include", "nvvm", "cccl")
DRIVER_LIBRARY = "libcuda.so.1"
DRIVER_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64")
WSL_FOLDER = "/usr/lib/wsl/lib"


def find_toolkit(inherited: Mapping[str, str], installed: Path = INSTALLED) -> Path | None:
    """The toolkit that build tools find by themselves; None where they find none. It may lack `bin/nvcc`."""
    for name in VARIABLES:
        if given := inherited.get(name):
            return Path(given)
    if nvcc := shutil.which("nvcc", path=inherited.get("PATH", os.defpath)):
        return Path(nvcc).resolve().parents[1]
    return installed if installed.exists() else None


def find_wheel_toolkit() -> Path | None:
    """The toolkit of the pip packages that PyTorch brings along; None where its compiler is not installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    found = sorted(file.parents[1] for root in roots for file in Path(root).glob("cu*/bin/nvcc"))
    return found[-1] if found else None


def server_tools(inherited: Mapping[str, str], *, installed: Path = INSTALLED) -> dict[str, str]:
    """The variables that a server on a GPU needs to compile. PATH has this environment's own programs (ninja) first,
    as it has not where the environment isn't activated. Raises OSError."""
    own = str(Path(sys.executable).parent)
    tools = {"PATH": os.pathsep.join([own, inherited.get("PATH", os.defpath)])}
    wheel = find_wheel_toolkit()
    if find_toolkit(inherited, installed) is None and wheel is not None:
        tools["CUDA_HOME"] = str(make_cuda_home(wheel, Path(tempfile.gettempdir())))
    return tools


def make_cuda_home(toolkit: Path, parent: Path) -> Path:
    """Links below `parent` to the wheels' `toolkit`, in the layout that build tools know.

    The same folder each time, since compiled kernels are kept with it in their commands.
    """
    digest = hashlib.sha256(str(toolkit).encode()).hexdigest()[:8]
    home = parent / f"grpo-cuda-{os.geteuid()}-{digest}"
    for folder in (home, home / "lib64", home / "lib64" / "stubs"):
        make_private(folder)
    for name in FOLDERS:
        if (toolkit / name).exists():
            _link(home / name, toolkit / name)
    for library in sorted((toolkit / "lib").iterdir()):
        _link(home / "lib64" / library.name, library)
        if ".so." in library.name:
            _link(home / "lib64" / f"{library.name.partition('.so.')[0]}.so", library)
    if driver := next(_driver_libraries(), None):
        _link(home / "lib64" / "stubs" / "libcuda.so", driver)
    return home


def _driver_libraries() -> Iterator[Path]:
    given = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    files = (Path(folder) / DRIVER_LIBRARY for folder in (*given, *DRIVER_FOLDERS, WSL_FOLDER) if folder)
    return (file for file in files if file.exists())


def _link(link: Path, target: Path) -> None:
    """Replaced in one move: another server may be compiling with it."""
    with contextlib.suppress(OSError):
        if link.readlink() == target:
            return
    made = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    made.symlink_to(target)
    made.replace(link)


def why_no_toolkit(inherited: Mapping[str, str]) -> str:
    """Empty where a toolkit with a compiler is found, or can be made."""
    found = find_toolkit(inherited)
    if found is None:
        return "" if find_wheel_toolkit() is not None else "there is no CUDA toolkit, nor that of the pip packages"
    return "" if (found / "bin" / "nvcc").exists() else f"{found} has no bin/nvcc"


def find_compiler(inherited: Mapping[str, str], variable: str, *names: str) -> str | None:
    """`variable`'s own, else the first of `names` that is on PATH."""
    given = inherited.get(variable, "").split()[:1]
    found = (shutil.which(name, path=inherited.get("PATH", os.defpath)) for name in (given or names))
    return next((program for program in found if program), None)


def find_ninja(inherited: Mapping[str, str]) -> str | None:
    """As the server will: with this environment's own programs first."""
    own = str(Path(sys.executable).parent)
    return shutil.which("ninja", path=os.pathsep.join([own, inherited.get("PATH", os.defpath)]))


def python_header() -> Path:
    """Where `Python.h` belongs; it may not be there."""
    return Path(sysconfig.get_paths()["include"]) / "Python.h"
