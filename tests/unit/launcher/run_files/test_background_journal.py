"""A journal in the background: a disk that stalls delays the thread that writes, not the loop that records."""

import asyncio
import threading

from launcher.run_files import journal
from launcher.run_files.journal import Journal, read_lines


def test_a_record_returns_at_once_and_the_lines_are_written_in_order(tmp_path, monkeypatch):
    free, append = threading.Event(), journal.append_line
    monkeypatch.setattr(journal, "append_line", lambda *line, **more: free.wait(30) and append(*line, **more))
    path = tmp_path / "events.jsonl"
    written = Journal(path, 1, in_background=True)
    recorded = [written.record("monitor.started", number=number) for number in range(20)]  # returns
    assert not path.exists()
    free.set()
    asyncio.run(written.flush())
    assert list(read_lines(path)) == recorded
