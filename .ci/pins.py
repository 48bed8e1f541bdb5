"""Which pins of constraints.txt are behind the newest release, and which package's requirement holds each back.

Run it in an environment that was installed with those pins: `python .ci/pins.py`. pip asks the index. Exit codes: 0
each pin is the newest that the others allow; 1 some are not, or are not what is installed.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]
CONSTRAINTS = REPOSITORY / "constraints.txt"


def requires(name: str) -> Iterable[str]:
    try:
        return distribution(name).requires or ()
    except PackageNotFoundError:  # of an extra that is not installed here
        return ()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, Version]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {canonical(name): Version(number) for name, _, number in (line.partition("==") for line in lines if line)}


def project() -> dict[str, Any]:
    """From the file: an editable installation keeps the list of the day it was made. With the groups of a checkout,
    which name the project itself, as one more extra."""
    file = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    own = file["project"]
    others = [one for one in itertools.chain(*file["dependency-groups"].values()) if not one.startswith(own["name"])]
    return own | {"optional-dependencies": own["optional-dependencies"] | {"checkout": others}}


def requirements(
    own: Iterable[str], required_by: Callable[[str], Iterable[str] | None] = requires
) -> dict[str, list[tuple[str, Requirement]]]:
    """Of each package that `own` reaches, who requires it and what of it, from what is installed."""
    found: dict[str, list[tuple[str, Requirement]]] = {}
    waiting, seen = [("this project", Requirement(text)) for text in own], set()
    while waiting:
        by, requirement = waiting.pop()
        name = canonical(requirement.name)
        if (by, requirement) not in found.setdefault(name, []):
            found[name].append((by, requirement))
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                nexts = map(Requirement, required_by(name) or ())
                waiting += [(name, one) for one in nexts if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def newest(pinned: Mapping[str, Version]) -> dict[str, Version]:
    """Of the pins that have a newer release, the newest; pre-releases count where the pin is one."""
    newer = {one["name"]: one["latest_version"] for one in json.loads(_pip("list", "--outdated", "--format=json"))}
    found = {canonical(name): Version(number) for name, number in newer.items()}
    for name in (name for name, pin in pinned.items() if pin.is_prerelease):
        found[name] = Version(_pip("index", "versions", "--pre", name).split("(")[1].split(")")[0])
    return {name: number for name, number in found.items() if name in pinned and number > pinned[name]}


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def refused_by_pip(name: str, number: Version) -> list[str]:
    """What the newest requires that the other pins do not allow."""
    others = [line for line in CONSTRAINTS.read_text().splitlines() if canonical(line.partition("==")[0]) != name]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(others))
        constraints.flush()
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "-c", constraints.name, f"{name}=={number}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    said = re.findall(r"^ +(\S+ \S+ depends on .+)$", done.stdout + done.stderr, re.M)
    return said or [f"pip refuses it: {done.stderr.strip().splitlines()[-1]}"]


def lines(
    pinned: Mapping[str, Version],
    newer: Mapping[str, Version],
    required: Mapping[str, list[tuple[str, Requirement]]],
    refused: Callable[[str, Version], list[str]],
) -> tuple[list[str], list[str]]:
    """What is held back, and what could move: a line for each pin that is behind."""
    held, free = [], []
    for name, number in sorted(newer.items()):
        holders = [
            f"{by} requires {wanted}" for by, wanted in required.get(name, ()) if not wanted.specifier.contains(number)
        ]
        holders = holders or refused(name, number)
        line = f"{name} {pinned[name]}, newest {number}"
        (held if holders else free).append(f"{line}: {'; '.join(holders) or 'nothing holds it back'}")
    return held, free


def main() -> int:
    pinned, here = pins(CONSTRAINTS.read_text()), {canonical(one.name): one.version for one in distributions()}
    own = project()
    required = requirements([*own["dependencies"], *itertools.chain(*own["optional-dependencies"].values())])
    absent = sorted(required.keys() - here.keys())
    unpinned = sorted(required.keys() - pinned.keys() - {"pip"})
    unneeded = [] if absent else sorted(pinned.keys() - required.keys())
    other = sorted(
        name for name in required.keys() & pinned.keys() & here.keys() if Version(here[name]) != pinned[name]
    )
    held, free = lines(pinned, newest(pinned), required, refused_by_pip)
    for title, found in (
        ("held back", held),
        ("behind, and nothing holds it back", free),
        ("required, but not pinned", unpinned),
        ("pinned, but nothing requires it", unneeded),
        ("installed in another version than the pin", other),
        ("not installed here, so what they require is unknown", absent),
    ):
        print(f"{title}: {len(found)}", *found, sep="\n  ")
    return 1 if free or unpinned or unneeded or other else 0


if __name__ == "__main__":
    sys.exit(main())
