"""Append-only records: what a reader gets back after crashes, full disks and numbers that JSON doesn't know."""

import errno
import json
import logging
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.disk_faults import DiskFault
from launcher.base.errors import JournalError
from launcher.base.messages import ServerState
from launcher.run_files.journal import Journal, LineLog, append_line, current_lines, encode, read_lines

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "events.jsonl"


def steps(path):
    return [line["step"] for line in read_lines(path)]


def test_lines_come_back_in_order(file):
    for step in range(3):
        append_line(file, {"step": step}, durable=step == 1)
    assert steps(file) == [0, 1, 2]
    assert file.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'


def test_what_must_be_durable_is_synced_once_it_is_written(file, monkeypatch):
    """Each event is: what the Coordinator that follows reads must outlive the machine, not only the process."""
    synced, fsync = [], os.fsync

    def noted(fd):
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_relative_to(file.parent):  # a thread that an earlier test left may probe its disk
            synced.append((str(path), file.read_text()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    append_line(file, {"step": 0})
    assert LineLog(file).append({"step": 1})
    assert synced == []
    append_line(file, {"step": 2}, durable=True)
    assert synced == [(str(file), '{"step": 0}\n{"step": 1}\n{"step": 2}\n')]
    Journal(file, 1).record("run.began")
    assert len(synced) == 2
    assert '"event": "run.began"' in synced[1][1]


def test_a_sync_that_fails_is_a_journal_error_and_its_line_waits(file, monkeypatch):
    def fails(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lines = LineLog(file, durable=True)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fails)
        assert not lines.append({"step": 0})
        assert (lines.waiting, lines.fault) == (1, DiskFault.IO_ERROR)
    assert lines.flush()
    assert (lines.waiting, lines.fault) == (0, None)
    assert steps(file) == [0], "once, although its first write was complete"


def test_a_line_of_which_the_end_alone_was_refused_is_written_once(file, monkeypatch):
    lines, write = LineLog(file), os.write
    assert lines.append({"step": 0})
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:-1]))
        assert not lines.append({"step": 1})
        assert file.read_text() == '{"step": 0}\n'
    assert lines.append({"step": 2})
    assert file.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'


def test_a_line_that_another_wrote_after_a_refused_one_is_not_taken_back(file, monkeypatch):
    def fails(fd):
        with file.open("ab") as other:
            other.write(b'{"step": 9}\n')
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lines = LineLog(file, durable=True)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fails)
        assert not lines.append({"step": 0})
    assert 9 in steps(file)


def test_a_missing_file_has_no_lines_and_is_not_created(file):
    assert steps(file) == []
    assert not file.exists()


@pytest.mark.slow
@settings(max_examples=40)
@given(st.dictionaries(st.text(), json_values))
def test_any_record_is_one_line_of_strict_json(record):
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_read_back_as_themselves(file, value):
    append_line(file, {"loss": value, "nested": [value]})
    (line,) = read_lines(file)
    assert isinstance(line["loss"], str)
    assert repr(float(line["loss"])) == repr(float(line["nested"][0])) == repr(value)


def test_values_of_other_types_never_end_a_run(file):
    append_line(
        file,
        {
            "path": Path("a/b"),
            "state": ServerState.READY,
            "numpy": np.float32(0.5),
            "nan": np.float32("nan"),
            "array": np.zeros(3),
            "set": {1},
            "surrogate": "\udc80",
            7: "int key",
        },
    )
    (line,) = read_lines(file)
    assert line["path"] == "a/b"
    assert line["state"] == "READY"
    assert line["numpy"] == 0.5
    assert line["set"] == [1]
    assert line["nan"] == "NaN"
    assert line["array"] == "[0. 0. 0.]"
    assert line["7"] == "int key"


@pytest.mark.parametrize("torn", [b'{"step": 1', b'{"step": 1, "text": "\xe2\x82', b"\0" * 700, b"12", b"[" * 100_000])
def test_a_line_torn_by_a_crash_costs_only_itself(file, torn):
    append_line(file, {"step": 0})
    with file.open("ab") as tail:
        tail.write(torn)
    append_line(file, {"step": 2})
    lines = read_lines(file)
    assert [line["step"] for line in lines] == [0, 2]
    assert lines.skipped == 1
    assert lines.first_skipped.startswith("line 2: ")


def test_a_line_that_lost_only_its_newline_is_whole(file):
    file.write_bytes(b'{"step": 0}')
    append_line(file, {"step": 1})
    lines = read_lines(file)
    assert [line["step"] for line in lines] == [0, 1]
    assert lines.skipped == 0


def test_below_a_file_there_is_none(file):
    """As below a cluster.fileroot that is a file, which is named elsewhere."""
    file.touch()
    assert list(read_lines(file / "logs" / "events.jsonl")) == []


def test_a_file_that_cant_be_read_is_named(tmp_path):
    with pytest.raises(JournalError, match="can't be read: Is a directory"):
        list(read_lines(tmp_path))


def test_a_second_reading_counts_anew(file):
    file.write_bytes(b"{\n")
    lines = read_lines(file)
    assert (list(lines), list(lines)) == ([], [])
    assert lines.skipped == 1


def test_a_damaged_file_without_newlines_is_one_line_read_in_bounded_memory(file, monkeypatch):
    monkeypatch.setattr("launcher.run_files.journal.LONGEST_LINE", 64)
    file.write_bytes(b"x" * 1000 + b"\n" + b'{"step": 1}\n')
    lines = read_lines(file)
    assert [line["step"] for line in lines] == [1]
    assert lines.skipped == 1


APPEND_MANY = """
import sys
from pathlib import Path
from launcher.run_files.journal import append_line
for number in range(300):
    append_line(Path(sys.argv[1]), {"writer": int(sys.argv[2]), "number": number, "text": "x" * (number * 37 % 9000)})
"""


def test_several_processes_share_a_file_without_tearing_a_line(file):
    writers = [subprocess.Popen([sys.executable, "-c", APPEND_MANY, str(file), str(writer)]) for writer in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    lines = read_lines(file)
    numbers = {writer: [line["number"] for line in lines if line["writer"] == writer] for writer in range(3)}
    assert numbers == {writer: list(range(300)) for writer in range(3)}
    assert lines.skipped == 0


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(JournalError, match=r"gone/metrics\.jsonl can't be written: No such file"):
        append_line(tmp_path / "gone" / "metrics.jsonl", {})


def test_a_write_that_the_system_refuses_is_a_journal_error(file):
    append_line(file, {"step": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, hard))
    try:
        with pytest.raises(JournalError, match=os.strerror(errno.EFBIG)):
            append_line(file, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append_line(file, {"step": 2})
    assert steps(file) == [0, 2]


def test_a_full_disk_tears_a_line_and_says_so(tiny_disk):
    file = tiny_disk / "metrics.jsonl"
    append_line(file, {"step": 0})
    with pytest.raises(JournalError, match="No space left"):
        append_line(file, {"step": 1, "text": "x" * 2**20})
    os.truncate(file, 100)
    append_line(file, {"step": 2})
    assert steps(file) == [0, 2]


def test_a_line_log_outlives_a_full_disk_and_then_writes_what_waited(tiny_disk, caplog):
    lines = LineLog(tiny_disk / "metrics.jsonl")
    assert lines.append({"step": 0})
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"\0" * tiny_disk.free())
    big = "x" * 5000
    with caplog.at_level(logging.WARNING):
        assert [lines.append({"step": step, "text": big}) for step in (1, 2, 3)] == [False, False, False]
        assert lines.waiting == 3
        ballast.unlink()
        assert lines.append({"step": 4})
    assert steps(lines.path) == [0, 1, 2, 3, 4]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "No space left" in caplog.messages[0]
    assert "no line was lost" in caplog.messages[1]


def test_a_line_log_keeps_a_bounded_number(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("launcher.run_files.journal.MOST_WAITING", 3)
    folder = tmp_path / "late"
    lines = LineLog(folder / "metrics.jsonl")
    for step in range(5):
        lines.append({"step": step})
    folder.mkdir()
    assert lines.flush()
    assert lines.lost == 2
    assert steps(lines.path) == [2, 3, 4]
    assert "2 lines were lost" in caplog.text


def test_an_event_says_when_who_and_why(file):
    journal = Journal(file, 2, lambda: 12.5)
    before = time.monotonic()
    returned = journal.record(
        "server.died", subject="llm_server-0", reason="SIGKILL", global_step=7, incident=1, pid=42, detected_after_s=0.1
    )
    (line,) = read_lines(file)
    assert line == returned
    assert before <= line.pop("monotonic") <= time.monotonic()
    assert line == {
        "time": 12.5,
        "event": "server.died",
        "attempt": 2,
        "subject": "llm_server-0",
        "reason": "SIGKILL",
        "global_step": 7,
        "incident": 1,
        "pid": 42,
        "detected_after_s": 0.1,
    }


def test_a_fact_never_hides_what_every_event_has(file):
    Journal(file, 2, lambda: 12.5).record("server.restarting", attempt=5, time="soon")
    (line,) = read_lines(file)
    assert (line["attempt"], line["time"]) == (2, 12.5)
    assert (line["fact.attempt"], line["fact.time"]) == (5, "soon")


def test_a_journal_never_raises_for_the_disk(tmp_path):
    Journal(tmp_path / "gone" / "events.jsonl", 1, lambda: 0.0).record("run.started")


def lines_of(*written):
    return [{"global_step": step, "attempt": attempt} for step, attempt in written]


@pytest.mark.parametrize(
    ("written", "standing"),
    [
        ([], []),
        ([(0, 1), (1, 1)], [(0, 1), (1, 1)]),
        ([(0, 1), (1, 1), (2, 1), (1, 2), (2, 2)], [(0, 1), (1, 2), (2, 2)]),
        # restored to step 0 and ended at 1: step 2 was trained on weights that are gone
        ([(0, 1), (1, 1), (2, 1), (1, 2)], [(0, 1), (1, 2)]),
        ([(0, 1), (1, 1), (0, 2)], [(0, 2)]),
    ],
)
def test_of_each_step_the_last_line_stands(written, standing):
    assert current_lines(lines_of(*written)) == lines_of(*standing)


def test_records_without_a_step_do_not_stand():
    assert current_lines([{"event": "x"}, {"global_step": "3"}, {"global_step": 3}]) == [{"global_step": 3}]
