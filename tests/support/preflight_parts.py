"""Parts for the tests of the pre-flight: machines, and what is missing for a configuration."""

from dataclasses import replace
from pathlib import Path

from launcher.base.errors import (
    UsageError,
)
from launcher.config.compose import compose
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.missing_files import find_shape
from launcher.resources.preflight import find_missing
from launcher.resources.run_plan import make_plan

ARITHMETIC = compose(["conf=arithmetic_cpu"])
MACHINE = Hardware(gpus=(), cpus=2, memory=24 * GIB, memory_free=20 * GIB, no_gpu="NVML finds no driver")
WITH_GPU = replace(MACHINE, gpus=(Gpu(name="NVIDIA H200", memory=140 * GIB, free=139 * GIB),), no_gpu="")


def missing(config, hardware=MACHINE) -> list[UsageError]:
    return find_missing(config, hardware, make_plan(config, hardware, find_shape(config)))


def the_one(config, kind, hardware=MACHINE) -> str:
    found = missing(config, hardware)
    assert [type(error) for error in found] == [kind], [str(error) for error in found]
    assert found[0].hint
    return str(found[0])


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
