"""Leaves in a CUDA library what one GPU and two models need: `slim.py IN OUT [--flash]`.

Each compilation unit has a fat binary in .nv_fatbin: a container of entries, one for each architecture. Kept are the
entries of sm_90(a). With --flash also only the units with bfloat16 attention of head dimension 64 and 128 without
softcap, and whatever is no attention; the others get an empty entry, as valid as any, so that nothing that loads the
library meets broken data: a kernel that was left out is "not found" at its first call. Addresses stay, so OUT has
holes.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAGIC, HEAD = 0xBA55ED50, struct.Struct("<IHHQ")  # magic, version, header's size, payload's size
ENTRY = struct.Struct("<HHIQ")  # kind, version, header's size, payload's size; architecture at 28, flags at 40
ARCH = 90
MAINLOOP = re.compile(
    r"CollectiveMainloopFwdSm90<\d+, cute::tuple<[^>]*>, cute::C<1>, cute::C<1> >, "
    r"cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(?P<k>\d+)> >, (?P<v>\d+), (?P<element>[\w:]+), float, "
    r"cutlass::arch::Sm90, (?:true|false), (?:true|false), (?P<softcap>true|false)"
)


def section(data: bytes, wanted: str) -> tuple[int, int]:
    start, size, count, names_at = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58))
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * i) for i in range(count)]
    names = data[heads[names_at][4] : heads[names_at][4] + heads[names_at][5]]
    for head in heads:
        if names[head[0] : names.index(b"\0", head[0])].decode() == wanted:
            return head[4], head[5]
    raise SystemExit(f"no section {wanted}")


def units(data: bytes, start: int, size: int) -> Iterator[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """Of each container: its start, its header's size, its end, and start, end and architecture of its entries."""
    at = start
    while at < start + size:
        magic, _, header, payload = HEAD.unpack_from(data, at)
        if magic != MAGIC:
            at += 8
            continue
        end, place, entries = at + header + payload, at + header, []
        while place < end:
            _, _, own, length = ENTRY.unpack_from(data, place)
            entries.append((place, place + own + length, struct.unpack_from("<I", data, place + 28)[0]))
            place += own + length
        yield at, header, end, entries
        at = end


def names(data: bytes, start: int, end: int) -> set[str]:
    """Of the kernels of one entry. {} of a compressed one that isn't plain ELF."""
    own = struct.unpack_from("<I", data, start + 4)[0]
    return {found.decode() for found in re.findall(rb"\.text\.([A-Za-z0-9_$]+)", data[start + own : end])}


def needed(kernels: set[str]) -> bool:
    """Whether a unit has anything but attention of the other sizes and types."""
    plain = subprocess.run(["c++filt", "-p"], input="\n".join(kernels), capture_output=True, text=True, check=True)
    for name in plain.stdout.splitlines():
        if "MainloopFwdSm80" in name:
            continue  # for other cards
        if "MainloopFwdSm90" not in name:
            return True
        found = MAINLOOP.search(name)
        if found is None or (
            found["k"] == found["v"]
            and found["k"] in ("64", "128")
            and found["element"] == "cutlass::bfloat16_t"
            and found["softcap"] == "false"
        ):
            return True
    return False


def empty_entry() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "empty.cu", Path(folder) / "empty.fatbin"
        source.write_text("__global__ void grpo_kit_left_out() {}\n")
        subprocess.run(
            ["nvcc", "-fatbin", "-gencode=arch=compute_90a,code=sm_90a", str(source), "-o", str(made)], check=True
        )
        data = made.read_bytes()
    ((_, header, end, _),) = units(data, 0, len(data))
    return data[header:end]


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("source", type=Path)
    given.add_argument("made", type=Path)
    given.add_argument("--flash", action="store_true")
    asked = given.parse_args()
    data = asked.source.read_bytes()
    out, empty = bytearray(data), empty_entry() if asked.flash else b""
    kept = left = 0
    for start, header, end, entries in units(data, *section(data, ".nv_fatbin")):
        own = [entry for entry in entries if entry[2] == ARCH]
        body = b"".join(data[first:last] for first, last, _ in own)
        if asked.flash:
            kernels = set().union(*(names(data, first, last) for first, last, _ in own))
            if not kernels or not needed(kernels):  # a compressed one is of sizes that this library has elsewhere too
                body, left = empty, left + 1
        kept += len(body)
        head = HEAD.pack(MAGIC, *HEAD.unpack_from(data, start)[1:3], len(body))
        out[start:end] = (head + data[start + 16 : start + header] + body).ljust(end - start, b"\0")
    with asked.made.open("wb") as file:
        for at in range(0, len(out), 4096):
            block = out[at : at + 4096]
            file.seek(len(block), 1) if not any(block) else file.write(block)
        file.truncate(len(out))
    asked.made.chmod(0o755)
    print(f"{asked.made.name}: {kept / 1e6:.1f} MB of kernels, {left} units emptied")


if __name__ == "__main__":
    main()
