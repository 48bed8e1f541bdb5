"""A run whose disk is full, has no inodes left, is read-only, fails, is over its quota, or does not answer for a while:
it waits, and nothing is lost or spent.

The run's files are on an ext4 of its own. Its servers print a line for each request, so that their logs grow as
SGLang's do.
"""

import contextlib
import errno
import os
import subprocess
import time
from pathlib import Path

import pytest

from launcher.run_files.journal import read_lines
from tests.programs.supervised_run import SupervisedRun
from tests.support.machine import need_programs

pytestmark = pytest.mark.timeout(900)
HELD_S = 10.0
STEPS = 80
"""More than the run takes until its disk has been broken each time."""
BYTES, INODES = 128 * 2**20, 2000


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem that can be filled, and frozen."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(BYTES)
    make = ["mkfs.ext4", "-q", "-N", str(INODES), str(image)]
    for words in (make, ["mount", "-o", "loop", str(image), str(folder)]):
        if subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("mounting a filesystem needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def refused_writes(tmp_path, small_disk):
    """The environment in which the writes of a run may be refused."""
    library = tmp_path / "refused_writes.so"
    source = Path(__file__).parents[1] / "programs" / "refused_writes.c"
    need_programs("cc")
    words = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(source), "-ldl"]
    subprocess.run(words, check=True, capture_output=True)
    more = {"REFUSED_FOLDER": str(small_disk), "REFUSED_SWITCH": str(switch_of(small_disk))}
    return {**os.environ, **more, "LD_PRELOAD": str(library)}


@contextlib.contextmanager
def full(folder: Path):
    """Not a byte is free, and what somebody removes is taken again until the end of the block."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        fill(file)
        yield lambda: fill(file)
    ballast.unlink()


def fill(file) -> None:
    with contextlib.suppress(OSError):
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


@contextlib.contextmanager
def without_inodes(folder: Path):
    many = folder / "many"
    many.mkdir()

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                (many / f"{time.monotonic_ns()}").touch(exist_ok=False)

    take()
    yield take
    for file in many.iterdir():
        file.unlink()
    many.rmdir()


@contextlib.contextmanager
def read_only(folder: Path):
    """A second mount of it on top: what is open stays writable, and would keep the kernel from changing the first. One
    in which the run has opened a file before it was changed can't be changed either, and another one is made."""
    while True:
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
        change = ["mount", "-o", "remount,bind,ro", str(folder)]
        changed = subprocess.run(change, stderr=subprocess.PIPE, text=True, check=False)
        if changed.returncode == 0:
            break
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        assert "busy" in changed.stderr, changed.stderr
    try:
        yield lambda: None
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def refusing(number: int):
    """Each write and sync of a file of the run fails with that error (tests/programs/refused_writes.c)."""

    @contextlib.contextmanager
    def broken(folder: Path):
        switch = switch_of(folder)
        switch.symlink_to(str(number))
        try:
            yield lambda: None
        finally:
            switch.unlink()

    return broken


def switch_of(folder: Path) -> Path:
    return folder.parent / "refused"


@contextlib.contextmanager
def frozen(folder: Path):
    """Who writes to it sleeps in the kernel until it thaws, as with a file server that is gone."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    try:
        yield lambda: None
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)


@contextlib.contextmanager
def frozen_in_a_checkpoint(folder: Path):
    """The same, while a checkpoint is being written, for which a probe of the disk may wait for long."""
    switch = switch_of(folder)
    switch.symlink_to("hold")
    try:
        while not list(folder.glob("checkpoints/**/.staging-*")):
            time.sleep(0.02)
        with frozen(folder) as keep:
            yield keep
    finally:
        switch.unlink()


def test_the_run_waits_for_its_disk_and_loses_and_spends_nothing(small_disk, refused_writes):
    """Whichever way it is broken: one run, since its start costs more than each of them."""
    ways = (
        (full, "no space left"),
        (without_inodes, "no inodes left"),
        (read_only, "it is read-only"),
        (refusing(errno.EIO), "input/output errors"),
        (frozen, "a write does not return"),
        (refusing(errno.EDQUOT), "the quota is exceeded"),
        (frozen_in_a_checkpoint, "a write does not return"),
    )
    with SupervisedRun(
        small_disk,
        steps=STEPS,
        servers=2,
        console=small_disk.parent / "console.log",
        environment=refused_writes,
        settings=("disk.stall_s=3.0",),
    ) as run:
        for number, (broken, said) in enumerate(ways, 1):
            run.wait_steps(run.steps_done() + 6)
            wait_for_the_disk(run, small_disk, broken, said, number)
        run.finish()
        run.check_ledger()
        first = run.events("incident.began")[0]
        assert [e for e in run.events("repair.begun") if e["at"] >= first["at"]] == [], "no budget was spent"
        assert run.events("server.died") == run.events("trainer.died") == []
        assert run.said().count("a disk can't be written") == len(ways), run.said()
        assert len(list(read_lines(run.paths.metrics))) == run.steps


def wait_for_the_disk(run: SupervisedRun, disk: Path, broken, said: str, number: int) -> None:
    """While it is `broken` for HELD_S, and until incident `number` is over. `said`: what is said of it."""
    servers = run.server_pids()
    with broken(disk) as keep:
        until = time.monotonic() + HELD_S
        # a person sees it before there is room again
        while time.monotonic() < until or run.said().count("a disk can't be written") < number:
            assert run.process.poll() is None, run.said()
            keep()
            time.sleep(0.2)
        ended = [pid for pid in servers.values() if not Path(f"/proc/{pid}").exists()]
        assert not ended, f"{ended} of {servers} have ended"
    run.wait_until(lambda: run.said().count(f"incident {number} is over") == 1, f"{said}: it is over")
    assert list(run.incidents().values()) == [("disk_full", "disk", True)] * number
    began = run.events("incident.began")[-1]
    met_by = (run.paths.logs, run.paths.default_checkpoints)  # a probe, or a checkpoint before it
    assert said in began["reason"]
    assert any(str(folder) in began["reason"] for folder in met_by)
    assert run.server_pids() == servers
