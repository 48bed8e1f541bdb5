"""Records of the run at their bounds: one writer at a time, no descriptor kept, numbers, and the last of an event."""

import asyncio
import errno
import fcntl
import json
import math
import os
import queue
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import JournalError
from launcher.run_files import journal
from launcher.run_files.journal import (
    Journal,
    LineLog,
    LineTail,
    append_line,
    current_line,
    current_lines,
    encode,
    last_of,
    newest_line,
    number_of,
    read_lines,
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "events.jsonl"


def steps(path):
    return [line["step"] for line in read_lines(path)]


def test_a_writer_waits_for_its_turn(file, monkeypatch):
    """The other one ends its line while this one waits."""
    with file.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waited = []

        def ends_its_line(seconds):
            waited.append(seconds)
            other.write(b'{"step": 0}\n')
            fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(journal.time, "sleep", ends_its_line)
        append_line(file, {"step": 1})
    assert len(waited) == 1
    assert 0 < waited[0] < 0.1
    assert steps(file) == [0, 1]


def test_one_that_was_stopped_while_it_wrote_silences_nobody(file, monkeypatch):
    monkeypatch.setattr(journal, "TURN_S", 0.05)
    with file.open("ab") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        append_line(file, {"step": 1})
        assert steps(file) == [1]


@pytest.mark.parametrize("refused", [OSError(errno.ENOLCK, "no locks"), BlockingIOError()], ids=["none", "taken"])
def test_without_its_turn_a_refused_line_is_not_taken_back(file, monkeypatch, refused):
    """Another may be writing behind it."""

    def fails(*_):
        raise refused if _[1:] else OSError(errno.EIO, "broken")

    monkeypatch.setattr(journal, "TURN_S", 0.01)
    monkeypatch.setattr(fcntl, "flock", fails)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(JournalError):
        append_line(file, {"step": 0}, durable=True)
    assert steps(file) == [0]


def test_the_newest_lines_that_wait_are_the_last(tmp_path):
    lines = LineLog(tmp_path / "gone" / "events.jsonl")
    for step in range(3):
        assert not lines.append({"step": step})
    assert [line["step"] for line in lines.newest_waiting(2)] == [1, 2]


def test_its_turn_is_over_with_its_line_and_no_file_stays_open(file):
    for step in range(3):
        append_line(file, {"step": step})
    assert os.path.realpath(file) not in {os.path.realpath(open_) for open_ in Path("/proc/self/fd").iterdir()}
    with file.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_is_made_is_for_others_to_read(file):
    umask = os.umask(0)
    try:
        append_line(file, {"step": 1})
    finally:
        os.umask(umask)
    assert oct(file.stat().st_mode & 0o777) == "0o644"


def test_text_is_as_it_was_written():
    assert encode({"reason": "größe"}) == '{"reason": "größe"}\n'.encode()


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        ("NaN", math.nan),
        ("-Infinity", -math.inf),
        ("0.25", 0.25),
        (True, -1.0),
        (None, -1.0),
        ([1], -1.0),
        ("many", -1.0),
        (10**400, -1.0),
    ],
)
def test_what_is_a_number_reads_back_and_nothing_else_does(value, number):
    assert number_of(value, -1.0) == pytest.approx(number, nan_ok=True)
    assert math.isnan(number_of("many"))


def test_of_several_torn_lines_the_first_is_named_and_none_before_the_reading(file):
    file.write_bytes(b'{"step": 0}\n{\n[]\n  \n{"step": 3}\n')
    lines = read_lines(file)
    assert (lines.skipped, lines.first_skipped) == (0, "")
    assert [line["step"] for line in lines] == [0, 3]
    assert (lines.skipped, lines.first_skipped[:7]) == (2, "line 2:")


def test_a_line_that_just_fits_is_whole_and_the_next_one_its_own(file, monkeypatch):
    first = encode({"text": "x" * 50})
    monkeypatch.setattr(journal, "LONGEST_LINE", len(first))
    file.write_bytes(first + encode({"step": 1}) + encode({"text": "x" * 70}) + encode({"step": 2}))
    lines = read_lines(file)
    assert [line.get("step") for line in lines] == [None, 1, 2]
    assert lines.skipped == 1


def test_the_last_of_an_event_is_that_of_its_attempt(file):
    for attempt, number in ((1, 1), (1, 2), (2, 3)):
        Journal(file, attempt).record("run.began", number=number)
        Journal(file, attempt).record("run.ended", number=-number)
    assert [last_of(file, "run.began", attempt).get("number") for attempt in (1, 2, 3)] == [2, 3, None]
    assert last_of(file, "run.paused", 1) == {}


def test_a_log_with_nothing_to_write_touches_no_file_and_says_nothing(file, caplog):
    assert LineLog(file).flush()
    assert not file.exists()
    assert caplog.messages == []


def test_lines_that_were_lost_are_said_only_when_the_disk_has_come_back(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal, "MOST_WAITING", 1)
    lines = LineLog(tmp_path / "late" / "events.jsonl")
    lines.append({"step": 0})
    lines.append({"step": 1})
    (tmp_path / "late").mkdir()
    lines.append({"step": 2})
    assert lines.lost == 2
    said = len(caplog.messages)
    assert lines.append({"step": 3})
    assert len(caplog.messages) == said


def test_a_journal_in_the_background_keeps_the_order_and_flush_alone_waits_for_the_disk(file, monkeypatch):
    disk_answers, append = threading.Event(), journal.append_line
    monkeypatch.setattr(journal, "append_line", lambda *line, **more: disk_answers.wait(30) and append(*line, **more))

    async def scenario():
        events = Journal(file, 1, in_background=True)
        recorded = [events.record("run.began", number=number) for number in range(20)]
        assert not file.exists()
        disk_answers.set()
        await events.flush()
        assert list(read_lines(file)) == recorded
        assert events.unwritten() == (), "what is written is not kept"

    asyncio.run(scenario())


def numbers(lines):
    return [line["number"] for line in lines]


def test_the_newest_of_what_the_disk_refused_is_shown_until_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_UNWRITTEN", 3)
    events = Journal(tmp_path / "late" / "events.jsonl", 1)
    for number in range(5):
        events.record("run.began", number=number)
    assert numbers(events.unwritten()) == [2, 3, 4]
    (tmp_path / "late").mkdir()
    events.write_waiting()
    assert events.unwritten() == ()
    assert numbers(read_lines(events.path)) == [0, 1, 2, 3, 4]


class Disk:
    """In place of `append_line`: writes as many lines as it is let, and tells of each that it was asked for it."""

    def __init__(self):
        self.asked = queue.Queue()
        self.may_write = threading.Semaphore(0)
        self.append = journal.append_line

    def __call__(self, *line, **more):
        self.asked.put(line)
        assert self.may_write.acquire(timeout=30)
        self.append(*line, **more)


def test_a_journal_in_the_background_shows_each_line_once_and_is_told_to_write_only_what_waits(tmp_path, monkeypatch):
    disk, submitted = Disk(), []
    file = tmp_path / "late" / "events.jsonl"

    async def scenario():
        events = Journal(file, 1, in_background=True)
        submit = events._writer.submit
        monkeypatch.setattr(events._writer, "submit", lambda do, *what: submitted.append(do) or submit(do, *what))
        events.write_waiting()
        assert submitted == [], "nothing waits"
        for number in range(2):
            events.record("run.began", number=number)
        await events.flush()  # refused
        assert numbers(events.unwritten()) == [0, 1]
        events.write_waiting()
        assert submitted[2:] == [events._lines.flush]
        submit(lambda: None).result(30)
        file.parent.mkdir()
        monkeypatch.setattr(journal, "append_line", disk)
        for number in range(2, 4):
            events.record("run.began", number=number)
        await asyncio.to_thread(disk.asked.get, timeout=30)
        assert numbers(events.unwritten()) == [0, 1, 2, 3], "what waits, and what waits for its turn"
        for _ in range(3):
            disk.may_write.release()
            await asyncio.to_thread(disk.asked.get, timeout=30)
        assert not events._written.done()
        asked = len(submitted)
        events.write_waiting()
        assert len(submitted) == asked, "the last is being written"
        monkeypatch.setattr(journal, "MOST_UNWRITTEN", 1)
        assert numbers(events.unwritten()) == [3]
        disk.may_write.release()
        await events.flush()
        assert events.unwritten() == ()
        assert numbers(read_lines(file)) == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_a_defect_of_the_writer_is_raised_by_the_flush_and_its_line_is_written_by_the_next(file, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("a defect")

    async def scenario():
        events = Journal(file, 1, in_background=True)
        with monkeypatch.context() as broken:
            broken.setattr(journal, "append_line", fails)
            events.record("run.began", number=0)
            with pytest.raises(RuntimeError, match="a defect"):
                await events.flush()
        events.record("run.began", number=1)
        await events.flush()

    asyncio.run(scenario())
    assert numbers(read_lines(file)) == [0, 1]


def test_who_records_is_not_held_up_by_a_line_that_is_being_written_nor_loses_one_that_made_room(file, monkeypatch):
    disk = Disk()
    monkeypatch.setattr(journal, "append_line", disk)
    monkeypatch.setattr(journal, "MOST_WAITING", 2)
    lines = LineLog(file)
    lines.add({"step": 0})
    writer = threading.Thread(target=lines.flush)
    writer.start()
    disk.asked.get(timeout=30)
    for step in (1, 2, 3):
        lines.add({"step": step})
    assert [line["step"] for line in lines.newest_waiting(9)] == [2, 3]
    for _ in range(3):
        disk.may_write.release()
    writer.join(30)
    assert (steps(file), lines.waiting, lines.lost) == ([0, 2, 3], 0, 1)


@pytest.mark.parametrize("since", [1, 3])
def test_a_tail_reads_what_has_come_since_and_no_line_before_its_end(file, since):
    file.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    tail = LineTail(file, since=since)
    assert ([line["step"] for line in tail.read()], tail.skipped) == ([1], 0), "it begins within a line"
    with file.open("ab") as more:
        more.write(b'ep": 2}\n{\n{"step": 4')
    assert ([line["step"] for line in tail.read()], tail.skipped, tail.first_skipped) == ([2], 1, "")
    whole = LineTail(file)
    assert ([line["step"] for line in whole.read()], whole.first_skipped[:7]) == ([0, 1, 2], "line 4:")
    assert list(tail.read()) == []
    with file.open("ab") as more:
        more.write(b"}")
    assert [line["step"] for line in tail.read(has_ended=True)] == [4]


def test_a_tail_of_what_is_not_there_or_can_not_be_read_has_no_lines(tmp_path):
    for path in (tmp_path / "gone", tmp_path):
        assert list(LineTail(path).read()) == []


def test_the_rest_of_an_overlong_line_belongs_to_it_also_where_it_comes_later(file, monkeypatch):
    monkeypatch.setattr(journal, "LONGEST_LINE", 64)
    file.write_bytes(b"x" * 64)
    tail = LineTail(file)
    assert (list(tail.read()), tail.skipped) == ([], 1)
    with file.open("ab") as more:
        more.write(b"x" * 10 + b'\n{"step": 1}\n')
    assert ([line["step"] for line in tail.read()], tail.skipped) == ([1], 1)


def test_a_last_line_without_its_end_is_read_by_who_reads_all(file):
    file.write_bytes(b'{"step": 0}\n{"step": 1}')
    assert steps(file) == [0, 1]


@pytest.mark.parametrize("window", [1, 11, 10**6])
def test_the_newest_line_is_the_last_that_the_end_of_the_file_shows(file, monkeypatch, window):
    monkeypatch.setattr(journal, "TAIL_WINDOW", window)
    assert newest_line(file) == {}
    file.write_bytes(b'{"step": 0}\n')
    assert newest_line(file) == ({"step": 0} if window > 11 else {})
    file.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}')
    assert newest_line(file) == ({} if window == 1 else {"step": 3})


@given(steps=st.lists(st.integers(0, 6), max_size=12), asked=st.integers(0, 6), window=st.sampled_from([1, 40, 10**6]))
def test_the_line_that_stands_is_the_same_from_the_end_of_the_file(tmp_path_factory, steps, asked, window):
    path = tmp_path_factory.mktemp("lines") / "ledger.jsonl"
    for number, step in enumerate(steps):
        append_line(path, {"global_step": step, "number": number})
        append_line(path, {"event": "no step"})
    found = [line for line in current_lines(read_lines(path)) if line["global_step"] == asked]
    with patch.object(journal, "TAIL_WINDOW", window):
        assert current_line(path, asked) == (found[-1] if found else None)


def test_a_long_run_is_not_read_to_restore_its_last_step(tmp_path, monkeypatch):
    """Of 100,000 steps it was 7 s and 0.3 GB in the trainer at each of its restarts."""
    path = tmp_path / "ledger.jsonl"
    line = json.dumps({"global_step": 1, "prompt_ids": ["p"] * 100}) + "\n"
    path.write_text(line * 20_000 + line.replace("1,", "7,", 1))
    read, parse = [], journal.parse_line
    monkeypatch.setattr(journal, "parse_line", lambda line: read.append(line) or parse(line))
    assert current_line(path, 7)["global_step"] == 7
    assert sum(map(len, read)) <= journal.TAIL_WINDOW


def test_of_a_file_that_is_not_there_no_line_is_current_or_newest(tmp_path):
    assert current_line(tmp_path / "gone", 0) is None
    assert newest_line(tmp_path / "gone") == {}


def test_what_has_no_step_is_passed_over_and_the_last_line_needs_no_end(file):
    file.write_bytes(b'{"global_step": 1}\n{"global_step": "2"}\n{"global_step": 2}')
    assert current_line(file, 2) == {"global_step": 2}
    assert current_line(file, 1) == {"global_step": 1}
