"""Which AReaL an environment has, and what differs between its versions. Nothing of it is imported or run.

1.0 was run (1.0.4). 0.3.1 to 0.5.3 are known from their sources: another launcher's module, other words for
`recover.mode`, `AREAL_RECOVER_RUN` where the trainer is started without that launcher, and a resume that always
loads an optimizer, which an export has not.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RECORD_ROOT = re.compile(r'nfs_record_root: str = field\(\s*default="([^"]+)"')
"""AReaL's own default, as its source has it."""
IS_RECOVERY = "AREAL_RECOVER_RUN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArealVersion:
    """`module`: its local launcher. `modes`: of `recover.mode`, those that resume whatever this launcher starts again.
    `is_before_1_0`: it resumes from its own recover folder only, and the training script says how weights reach the
    servers, whatever the YAML has."""

    module: str
    modes: tuple[object, ...]
    is_before_1_0: bool = False

    @property
    def file(self) -> Path:
        return Path(*self.module.split(".")).with_suffix(".py")

    def variables(self, *, resumes: bool) -> Mapping[str, str]:
        """What its own launcher tells a trainer about a resume."""
        return {IS_RECOVERY: str(int(resumes))} if self.is_before_1_0 else {}


NEW = ArealVersion(module="areal.infra.launcher.local", modes=("on", "auto", True))  # YAML 1.1 reads `on` as true
OLD = ArealVersion(module="areal.launcher.local", modes=("auto", "resume"), is_before_1_0=True)


def areal_in(python: str | None, env: Mapping[str, object]) -> ArealVersion | None:
    """Of the environment of that interpreter; None where it has no AReaL with a local launcher."""
    for folder in _import_folders(python, env):
        for version in (NEW, OLD):
            if (folder / version.file).is_file():
                return version
    return None


def areal_number(python: str | None, env: Mapping[str, object]) -> str:
    """As its package says; "" where that does not show."""
    for folder in _import_folders(python, env):
        for info in folder.glob("areal-*.dist-info"):
            return info.name.split("-")[1].removesuffix(".dist")
    return ""


def default_record_root(python: str | None, env: Mapping[str, object]) -> str | None:
    for folder in _import_folders(python, env):
        file = folder / "areal" / "api" / "cli_args.py"
        if file.is_file() and (found := RECORD_ROOT.search(file.read_text(errors="replace"))):
            return found[1]
    return None


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
