"""The console's lines come from the journal as it grows."""

from launcher.event_lines import EventTail, tell
from launcher.journal import Journal


def test_new_events_are_told_once_in_words_and_only_this_attempts(tmp_path):
    path = tmp_path / "events.jsonl"
    Journal(path, 1).record("server.died", subject="server-0", reason="of the attempt before")
    tail = EventTail(path, 2)
    assert tail.new_lines() == []
    journal = Journal(path, 2)
    journal.record("server.died", subject="server-1", reason="ended by SIGKILL")
    journal.record("server.loading", subject="server-1")
    journal.record("server.ready", subject="server-1", weight_version=41, recovered_after_s=2.81)
    assert tail.new_lines() == [
        "server-1 died: ended by SIGKILL",
        "server-1 READY, weight_version 41, 2.8 s after it died",
    ]
    assert tail.new_lines() == []


def test_a_line_that_is_still_being_written_waits_for_its_rest(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path, 1)
    assert tail.new_lines() == []
    line = b'{"event": "trainer.died", "attempt": 1, "reason": "process 7 ended"}\n'
    path.write_bytes(line[:20])
    assert tail.new_lines() == []
    with path.open("ab") as file:
        file.write(line[20:])
    assert tail.new_lines() == ["the trainer died: process 7 ended"]


def test_what_nobody_needs_to_hear_of_is_not_said():
    assert tell({"event": "checkpoint.committed"}) == ""
