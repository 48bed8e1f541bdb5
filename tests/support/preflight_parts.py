"""Parts for the tests of plans and of the pre-flight: machines, changed settings, what is missing for them."""

import copy
import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launcher.base.errors import UsageError
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from launcher.resources.missing_files import find_shape
from launcher.resources.plan_view import WIDTH, show
from launcher.resources.preflight import find_missing
from launcher.resources.run_plan import make_plan
from tests.support.composed import composed

ARITHMETIC = composed("conf=arithmetic_cpu")
NO_GPU = Hardware(gpus=(), cpus=2, memory=24 * GIB, memory_free=20 * GIB, no_gpu="NVML finds no driver")
WITH_GPU = replace(NO_GPU, gpus=(Gpu(name="NVIDIA H200", memory=140 * GIB, free=139 * GIB),), no_gpu="")


def changed(base, **settings):
    """A copy with dotted keys changed, `__` standing for the dot."""
    config = copy.deepcopy(base)
    for key, value in settings.items():
        *sections, name = key.split("__")
        owner = config
        for section in sections:
            owner = getattr(owner, section)
        setattr(owner, name, value)
    return config


def printed(config, plan, *, width=WIDTH, terminal=False) -> str:
    out = io.StringIO()
    show(config, plan, Console(file=out, force_terminal=terminal, width=width))
    return out.getvalue()


def missing(config, hardware=NO_GPU) -> list[UsageError]:
    return find_missing(config, hardware, make_plan(config, hardware, find_shape(config)))


def the_one(config, kind, hardware=NO_GPU) -> str:
    found = missing(config, hardware)
    assert [type(error) for error in found] == [kind], [str(error) for error in found]
    assert found[0].hint
    return str(found[0])


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
