"""The kit for a bare GPU machine, as far as it can be checked without building it."""

import importlib.util
import re
import struct
import subprocess

import pytest

from launcher.config.compose import REPOSITORY
from scripts.lab.gpu_kit import slim

KIT = REPOSITORY / "scripts" / "lab" / "gpu_kit"


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_each_package_that_is_carried_has_a_pin():
    lines = (line.partition("#")[0] for line in (KIT / "packages.txt").read_text().splitlines())
    carried = [canonical(name) for line in lines for name in line.split()]
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line.partition("==")[0]) for line in constraints if "==" in line}
    assert [name for name in carried if name not in pinned] == []
    assert len(carried) > 50


def test_what_is_imported_of_the_project_is_there():
    names = (KIT / "imports.txt").read_text().split()
    own = [name for name in names if name.partition(".")[0] in ("launcher", "actors", "scripts")]
    assert own
    assert [name for name in own if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("script", sorted(KIT.glob("*.sh")), ids=lambda script: script.name)
def test_a_script_can_be_read_by_bash(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def entry(architecture, payload):
    head = bytearray(64)
    struct.pack_into("<HHIQ", head, 0, 2, 0x101, len(head), len(payload))
    struct.pack_into("<I", head, 28, architecture)
    return bytes(head) + payload


def test_a_fat_binary_is_read_entry_by_entry_and_padding_is_passed_over():
    entries = entry(80, b"old....."), entry(90, b"hopper..")
    body = b"".join(entries)
    container = struct.pack("<IHHQ", slim.MAGIC, 1, 16, len(body)) + body
    data = bytes(8) + container + bytes(16) + container
    found = list(slim.units(data, 0, len(data)))
    assert [(start, [architecture for _, _, architecture in of]) for start, _, _, of in found] == [
        (8, [80, 90]),
        (8 + len(container) + 16, [80, 90]),
    ]
    first, last, _ = found[0][3][1]
    assert data[first:last] == entries[1]
