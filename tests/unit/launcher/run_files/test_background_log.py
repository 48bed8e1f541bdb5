"""A disk that stalls delays the thread that writes, not the loop that records; the order stays."""

import threading

from launcher.run_files import journal
from launcher.run_files.background_log import BackgroundLineLog
from launcher.run_files.journal import Journal, read_lines


def test_a_record_returns_at_once_and_the_lines_are_written_in_order(tmp_path, monkeypatch):
    free, append = threading.Event(), journal.append_line
    monkeypatch.setattr(journal, "append_line", lambda *line, **more: free.wait(30) and append(*line, **more))
    path = tmp_path / "events.jsonl"
    lines = BackgroundLineLog(path, durable=True)
    written = Journal(path, 1, lines=lines)
    recorded = [written.record("monitor.started", number=number) for number in range(20)]  # returns
    assert not path.exists()
    free.set()
    assert lines.flush()
    assert list(read_lines(path)) == recorded


def test_what_the_disk_refuses_waits_for_room(tmp_path):
    path = tmp_path / "away" / "events.jsonl"
    lines = BackgroundLineLog(path)
    lines.append({"n": 1})
    assert not lines.flush()
    path.parent.mkdir()
    lines.append({"n": 2})
    assert lines.flush()
    assert list(read_lines(path)) == [{"n": 1}, {"n": 2}]


def test_a_line_that_can_not_be_written_is_reported_and_costs_no_other(tmp_path, caplog, monkeypatch):
    fails, append = [RuntimeError("a defect")], journal.append_line

    def append_or_fail(*line, **more):
        if fails:
            raise fails.pop()
        append(*line, **more)

    monkeypatch.setattr(journal, "append_line", append_or_fail)
    lines = BackgroundLineLog(tmp_path / "events.jsonl")
    lines.append({"n": 1})
    lines.append({"n": 2})
    assert lines.flush()
    assert "a defect" in caplog.text
    assert [line["n"] for line in read_lines(lines.path)] == [1, 2]
