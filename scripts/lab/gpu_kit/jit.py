"""Compiles here, for sm_90a, the kernels that SGLang would compile on a Hopper card: `jit FOLDER`.

SGLang looks for `<name>.so` in folders named by the hash of the source, the architecture and tvm_ffi's version
($TVM_FFI_CACHE_DIR), so what lies there is used as it is. A kernel that fails here is compiled on the GPU machine, and
so is one that isn't in the list below (5 to 10 s each).
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from scripts.lab.gpu_kit.hopper import pretend

BF16 = torch.bfloat16
KERNELS: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("activation.activation", "activation_module", (BF16,)),
    ("attention.rope", "_jit_fused_rope_module", (True, 128, BF16, BF16)),  # 1.5B
    ("attention.rope", "_jit_fused_rope_module", (True, 64, BF16, BF16)),  # 0.5B
    ("kvcache.kvcache", "_jit_kvcache_module", (512, 512)),
    ("kvcache.kvcache", "_jit_kvcache_module", (256, 256)),
    ("attention.clamp_position", "_jit_clamp_position_module", (torch.int64,)),
)


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    building = folder.with_name(folder.name + ".building")
    os.environ["TVM_FFI_CACHE_DIR"] = str(building)
    pretend()
    failed = 0
    for module, function, words in KERNELS:
        began = time.monotonic()
        try:
            getattr(importlib.import_module(f"sglang.kernels.ops.{module}"), function)(*words)
            said = "ok"
        except Exception as error:  # noqa: BLE001 - a missing kernel costs seconds on the device, not the kit
            said, failed = f"{type(error).__name__}: {str(error)[-600:]}", failed + 1
        print(f"{module} {words}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    for library in building.glob("*/*.so"):
        (folder / library.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, folder / library.parent.name / library.name)
    shutil.rmtree(building, ignore_errors=True)
    return int(failed == len(KERNELS))


if __name__ == "__main__":
    sys.exit(main())
