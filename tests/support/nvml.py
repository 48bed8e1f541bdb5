"""NVIDIA's driver library for machines without a GPU: built from C, and read through the real binding (pynvml)."""

import ctypes
import subprocess
from pathlib import Path

import pynvml

from tests.support.machine import need_programs

SOURCE = Path(__file__).parents[1] / "programs" / "nvml_stand_in.c"
LIBRARY = "libnvidia-ml.so.1"


def build(folder: Path) -> Path:
    """The library in `folder`, which LD_LIBRARY_PATH may name. Its answers come from NVML_* in the environment."""
    need_programs("cc")
    words = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(folder / LIBRARY), str(SOURCE)]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return folder / LIBRARY


def load(monkeypatch, library: Path, **answers: object) -> None:
    """In this process, until the test ends."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(library)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in answers.items():
        monkeypatch.setenv(f"NVML_{name.upper()}", str(value))
