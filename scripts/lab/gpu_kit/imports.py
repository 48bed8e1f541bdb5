"""Imports what a run on a Hopper card imports: imports.txt.

Without a GPU torch.cuda answers as an H100's, so that a rehearsal shows a missing package before any device time is
spent (rehearse.sh brings an empty libcuda.so.1, which `sgl_kernel` is linked with).
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from pathlib import Path

import torch

from scripts.lab.gpu_kit.hopper import pretend

NAMES = (Path(__file__).parent / "imports.txt").read_text().split()
NO_DRIVER = ("No CUDA GPUs are available", "Found no NVIDIA driver", "libcuda.so.1", "no NVIDIA driver")


def main() -> int:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        pretend()
    failed, began = [], time.monotonic()
    for name in NAMES:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - libraries exit at an import too
            said = f"{type(error).__name__}: {error}"
            if any(word in said for word in NO_DRIVER):
                print(f"{name}: needs a driver ({said[:160]})")
                continue
            failed.append(name)
            print(f"{name}: {said[:1500]}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}")
    took = time.monotonic() - began
    said = f"{len(NAMES) - len(failed)} of {len(NAMES)} imported in {took:.0f} s, a GPU: {has_gpu}"
    print(f"{said}; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
