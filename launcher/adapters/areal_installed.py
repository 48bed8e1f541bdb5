"""Which AReaL an environment has, as its files show it. Nothing of it is imported or run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

LAUNCHER = "areal.infra.launcher.local"
"""Its legacy launcher on one machine. The single controller came with the same version, 1.0."""


def has_areal(python: str | None, env: Mapping[str, object]) -> bool:
    """Whether that interpreter has an AReaL of 1.0 or later."""
    file = Path(*LAUNCHER.split(".")).with_suffix(".py")
    return any((folder / file).is_file() for folder in _import_folders(python, env))


def areal_number(python: str | None, env: Mapping[str, object]) -> str:
    """As its package says; "" where that does not show."""
    for folder in _import_folders(python, env):
        for info in folder.glob("areal-*.dist-info"):
            return info.name.split("-")[1].removesuffix(".dist")
    return ""


def _import_folders(python: str | None, env: Mapping[str, object]) -> Sequence[Path]:
    """Where that interpreter looks for packages, as far as its folder and PYTHONPATH show it."""
    given = str(env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    path = str(env.get("PATH", os.environ.get("PATH", os.defpath)))
    found = shutil.which(python or "python3", path=path)
    folders = [Path(folder) for folder in given.split(os.pathsep) if folder]
    if found is not None:
        root = Path(found).parent.parent
        folders += [*root.glob("lib/python3*/site-packages"), *root.glob("lib/python3*/dist-packages")]
    return [*folders, *(place for folder in folders for place in _edited(folder))]


def _edited(folder: Path) -> Sequence[Path]:
    """Checkouts that were installed in place, as their .pth files name them."""
    lines = [line for file in folder.glob("*areal*.pth") for line in file.read_text(errors="replace").splitlines()]
    return [Path(line) for line in lines if line.startswith("/")]
