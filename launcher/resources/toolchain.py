"""What compiles the kernels that SGLang builds on a GPU at their first use: CUDA's toolkit, ninja, compilers, headers.

pip installs a toolkit too, in a layout that no build tool knows: `nvcc` in a folder where nothing looks, libraries
without the names that a linker asks for. Where no other toolkit is found, `server_tools` makes a folder of links in the
usual layout. A server always gets CUDA_HOME.
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
COMPILER, RUNTIME = "bin/nvcc", "libcudart.so"
FOLDERS = ("bin", "include", "nvvm", "cccl")
DRIVER_LIBRARY = "libcuda.so.1"
DRIVER_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64")
WSL_FOLDER = "/usr/lib/wsl/lib"


def find_toolkit(inherited: Mapping[str, str], installed: Path = INSTALLED) -> Path | None:
    """The toolkit of the variables, which may lack something; else the first that can build: that of the `nvcc` on
    PATH, which may be a script that starts one elsewhere, or `installed`."""
    if given := _given(inherited):
        return Path(given[1])
    return next((found for found in _found(inherited, installed) if not _lacks(found)), None)


def _given(inherited: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable and its value."""
    return next(((name, value) for name in VARIABLES if (value := inherited.get(name))), None)


def _found(inherited: Mapping[str, str], installed: Path) -> Iterator[Path]:
    if nvcc := shutil.which("nvcc", path=inherited.get("PATH", os.defpath)):
        yield Path(nvcc).resolve().parents[1]
    if installed.exists():
        yield installed


def _lacks(toolkit: Path) -> str:
    """The first file without which no kernel is compiled or linked; "" where nothing is missing."""
    if not (toolkit / COMPILER).exists():
        return COMPILER
    return "" if _libraries(toolkit) is not None else f"lib64/{RUNTIME}"


def _libraries(toolkit: Path) -> Path | None:
    """The folder whose runtime a linker finds. Some packages have one for each target alone."""
    folders = (toolkit / "lib64", *sorted(toolkit.glob("targets/*/lib")))
    return next((folder for folder in folders if (folder / RUNTIME).exists()), None)


def find_wheel_toolkit() -> Path | None:
    """The toolkit of the pip packages that PyTorch brings along; None where its compiler is not installed, or has no
    runtime beside it."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    compilers = (file for root in roots for file in Path(root).glob(f"cu*/{COMPILER}"))
    found = sorted(file.parents[1] for file in compilers if any(file.parents[1].glob(f"lib/{RUNTIME}.*")))
    return found[-1] if found else None


def server_tools(inherited: Mapping[str, str], *, installed: Path = INSTALLED) -> dict[str, str]:
    """The variables that a server on a GPU needs to compile. PATH has this environment's own programs (ninja) first,
    as it has not where the environment isn't activated. CUDA_HOME is always among them where there is a toolkit: each
    build tool looks for one in its own way, and may find a script. Raises OSError."""
    own = str(Path(sys.executable).parent)
    tools = {"PATH": os.pathsep.join([own, inherited.get("PATH", os.defpath)])}
    toolkit = find_toolkit(inherited, installed)
    libraries = None if toolkit is None else _libraries(toolkit)
    if toolkit is None and (wheel := find_wheel_toolkit()) is not None:
        toolkit, libraries = wheel, wheel / "lib"
    if toolkit is not None and libraries is not None and libraries != toolkit / "lib64":
        toolkit = make_cuda_home(toolkit, libraries, Path(tempfile.gettempdir()))
    return tools if toolkit is None else tools | {"CUDA_HOME": str(toolkit)}


def make_cuda_home(toolkit: Path, libraries: Path, parent: Path) -> Path:
    """Links below `parent` to `toolkit` and the folder of its `libraries`, in the layout that build tools know.

    The same folder each time, since compiled kernels are kept with it in their commands.
    """
    digest = hashlib.sha256(str(toolkit).encode()).hexdigest()[:8]
    home = parent / f"grpo-cuda-{os.geteuid()}-{digest}"
    for folder in (home, home / "lib64", home / "lib64" / "stubs"):
        make_private(folder)
    for name in FOLDERS:
        for folder in (toolkit, libraries.parent):  # headers may lie beside the libraries of a target
            if (folder / name).exists():
                _link(home / name, folder / name)
    for library in sorted(libraries.iterdir()):
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


def why_no_toolkit(inherited: Mapping[str, str], installed: Path = INSTALLED) -> str:
    """Empty where a toolkit that can build is found, or can be made."""
    if given := _given(inherited):
        name, value = given
        return f"{name}={value} has no {lacking}" if (lacking := _lacks(Path(value))) else ""
    if find_toolkit(inherited, installed) is not None or find_wheel_toolkit() is not None:
        return ""
    passed = "; ".join(f"{found} has no {_lacks(found)}" for found in _found(inherited, installed))
    return "there is no CUDA toolkit, nor that of the pip packages" + (f" ({passed})" if passed else "")


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
