"""What a process prints reaches its log; a disk that refuses it neither blocks nor ends the process."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from actors.processes import log_drain
from actors.processes.log_drain import LogDrain
from actors.processes.process_tree import open_files
from tests.support.machine import scaled

deadline_s = partial(scaled, 30.0)
PRINTS = "import sys\nfor n in range({lines}): print(f'line {{n:05}}' + 'x' * 100, flush=True)"


def printing(drain: LogDrain, code: str) -> subprocess.Popen:
    with drain.entrance() as output:
        started = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=output, stderr=output)
    drain.begin()
    return started


def until(holds) -> None:
    give_up_at = time.monotonic() + deadline_s()
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def check_that_all_is_there_or_counted(text: str, *, least: int) -> list[str]:
    """Of 3,000 lines, of which `least` bytes or more were lost; the lines that say so. Each may have ended a line that
    was cut, so that it begins at the left."""
    said = [line for line in text.splitlines() if line.startswith("====")]
    lost = sum(int(line.partition("; ")[2].split()[0]) for line in said)
    assert lost >= least
    kept = len(text) - sum(len(line) + 1 for line in said)
    assert 0 <= kept + lost - 3000 * len("line 00000" + "x" * 100 + "\n") <= len(said)
    return said


def test_all_of_it_is_there_when_it_has_settled(tmp_path):
    drain = LogDrain(tmp_path / "log")
    printing(drain, PRINTS.format(lines=2000)).wait(deadline_s())
    drain.settle(deadline_s())
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line[:10] for line in lines] == [f"line {n:05}" for n in range(2000)]


def test_who_is_silent_has_no_log_open(tmp_path):
    drain = LogDrain(tmp_path / "log")
    with drain.entrance() as output:
        mine = os.dup(output)
    drain.begin()
    for word in (b"one\n", b"two\n"):
        os.write(mine, word)
        until(lambda said=word: (tmp_path / "log").exists() and (tmp_path / "log").read_bytes().endswith(said))
        until(lambda: not list(open_files(os.getpid(), str(tmp_path))))
    os.close(mine)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_full_disk_stops_nobody_and_the_newest_lines_come_when_there_is_room(tiny_disk):
    log, ballast = tiny_disk / "log", tiny_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    drain = LogDrain(log, buffer_bytes=2**17)
    process = printing(drain, PRINTS.format(lines=3000))
    assert process.wait(deadline_s()) == 0, "it was neither blocked nor ended"
    until(lambda: drain.dropped > 0 and drain._why)  # refused, and not only late to be written
    dropped_before = drain.dropped
    ballast.unlink()
    drain.settle(deadline_s())
    text = log.read_text()
    assert text.rstrip().endswith("line 02999" + "x" * 100)
    said = check_that_all_is_there_or_counted(text, least=dropped_before)
    assert "No space left on device" in said[0]
    assert "bytes were lost" in said[0]


def test_what_a_late_writer_lost_is_said_too(tmp_path, monkeypatch):
    """On a busy machine, with a disk that refuses nothing: the log had a gap that nobody was told of."""
    begun, released, write = threading.Event(), threading.Event(), log_drain.os.write

    def late(*of):
        begun.set()
        released.wait(deadline_s())
        return write(*of)

    monkeypatch.setattr(log_drain.os, "write", late)
    drain = LogDrain(tmp_path / "log", buffer_bytes=2**17)
    process = printing(drain, PRINTS.format(lines=3000))
    try:
        assert process.wait(deadline_s()) == 0
        until(lambda: begun.is_set() and drain.dropped > 0)
    finally:
        released.set()
    drain.settle(deadline_s())
    text = (tmp_path / "log").read_text()
    said = check_that_all_is_there_or_counted(text, least=1)
    assert all("was not written as fast as it came" in line for line in said)


def test_a_log_that_can_not_even_be_opened_stops_nobody(tmp_path):
    drain = LogDrain(tmp_path / "later" / "log")
    assert printing(drain, PRINTS.format(lines=10)).wait(deadline_s()) == 0
    drain.settle(0.05)  # returns although nothing could be written
    until(lambda: drain._why)
    (tmp_path / "later").mkdir()
    drain.settle(deadline_s())
    text = (tmp_path / "later" / "log").read_text()
    assert "nothing was lost" in text
    assert text.count("line ") == 10


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_stalled_disk_blocks_nobody(tmp_path, monkeypatch, lines):
    """A write that does not return until the end of the test."""
    released, write = threading.Event(), log_drain.os.write
    monkeypatch.setattr(log_drain.os, "write", lambda *of: released.wait(deadline_s()) and write(*of))
    drain = LogDrain(tmp_path / "log")
    try:
        assert printing(drain, PRINTS.format(lines=lines)).wait(deadline_s()) == 0
    finally:
        released.set()
        drain.settle(deadline_s())


@pytest.mark.slow
def test_a_reader_that_is_not_scheduled_makes_nobody_believe_that_all_is_written(tmp_path, monkeypatch):
    """On a busy machine between its read and what follows: the last words say why a server died."""
    read = log_drain.os.read

    def late(*of):
        data = read(*of)
        time.sleep(0.3)
        return data

    monkeypatch.setattr(log_drain.os, "read", late)
    drain = LogDrain(tmp_path / "log")
    assert printing(drain, PRINTS.format(lines=1)).wait(deadline_s()) == 0
    drain.settle(deadline_s())
    assert (tmp_path / "log").read_text().startswith("line 00000")


def test_a_slow_disk_gets_the_last_words_and_one_that_refuses_is_not_waited_for(tmp_path, monkeypatch):
    write = log_drain.os.write

    def slow(*of):
        time.sleep(10 * log_drain.SETTLE_S)
        return write(*of)

    monkeypatch.setattr(log_drain.os, "write", slow)
    drain = LogDrain(tmp_path / "log")
    assert printing(drain, PRINTS.format(lines=1)).wait(deadline_s()) == 0
    drain.finish()
    assert (tmp_path / "log").read_text().startswith("line 00000")

    refused = LogDrain(tmp_path / "not there" / "log")
    assert printing(refused, PRINTS.format(lines=1)).wait(deadline_s()) == 0
    until(lambda: refused._why)
    began = time.monotonic()
    refused.finish()
    assert time.monotonic() - began < log_drain.LAST_S


def test_a_disk_that_was_mounted_anew_gets_the_lines(tmp_path, monkeypatch):
    """As after the restart of a file server: a descriptor of before is refused for good."""
    write, stale, log = log_drain.os.write, [], tmp_path / "log"

    def refuses(file, data):
        if Path(f"/proc/self/fd/{file}").readlink() == log:
            stale.extend([] if stale else [(file, os.fstat(file).st_ino)])
            if (file, os.fstat(file).st_ino) in stale:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return write(file, data)

    monkeypatch.setattr(log_drain.os, "write", refuses)
    drain = LogDrain(log)
    assert printing(drain, PRINTS.format(lines=1)).wait(deadline_s()) == 0
    until(lambda: drain._why)
    log.rename(tmp_path / "of before")
    (tmp_path / "new").touch()
    (tmp_path / "new").rename(log)
    until(lambda: "line 00000" in log.read_text())
