"""The console's lines come from the journal as it grows."""

import pytest

from launcher.policy.canary_policy import LAST_ATTEMPT_BROKE
from launcher.reporting.event_lines import EventTail, tell
from launcher.run_files.journal import Journal


def told(tail):
    return [line for line in map(tell, tail.new_events()) if line]


def test_new_events_are_told_once_in_words_and_only_this_attempts(tmp_path):
    path = tmp_path / "events.jsonl"
    Journal(path, 1).record("server.died", subject="server-0", reason="of the attempt before")
    tail = EventTail(path, 2)
    assert told(tail) == []
    journal = Journal(path, 2)
    journal.record("server.ready", subject="server-1", weight_version=0)
    crash = {"subject": "server-1", "incident": 3, "cause": "server_crash"}
    journal.record("server.died", subject="server-1", reason="ended by SIGKILL", incident=3)
    journal.record("incident.began", reason="ended by SIGKILL", doing="it is being restarted", **crash)
    journal.record("server.restarting", subject="server-1", reason="server_crash of server-1: 1 of 3", incident=3)
    journal.record("server.ready", subject="server-1", weight_version=41, recovered_after_s=2.81, incident=3)
    journal.record("incident.ended", reason="it serves again", seconds=2.8123, is_mended=True, **crash)
    assert told(tail) == [
        "server-1 READY, weight_version 0",
        "incident 3: server-1 crashed (ended by SIGKILL); it is being restarted",
        "incident 3 is over after 2.8 s: server-1 serves again",
    ]
    assert told(tail) == []


def test_a_line_that_is_still_being_written_waits_for_its_rest(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = EventTail(path, 1)
    assert told(tail) == []
    line = b'{"event": "gate.waiting", "attempt": 1, "reason": "nobody answers"}\n'
    path.write_bytes(line[:20])
    assert told(tail) == []
    with path.open("ab") as file:
        file.write(line[20:])
    assert told(tail) == ["the trainer waits at the gate: nobody answers"]


def test_a_pause_that_was_asked_for_is_told_once(tmp_path):
    tail, journal = EventTail(tmp_path / "events.jsonl", 1), Journal(tmp_path / "events.jsonl", 1)
    asked = "a pause asked by me@here: lunch"
    journal.record("run.hold_asked", subject="user", reason=asked)
    journal.record("run.paused", reason=asked, state="PAUSED")
    journal.record("trainer.pausing", subject="trainer", reason=asked, save=False)
    assert told(tail) == [f"the run is being paused: {asked}"]


def test_what_nobody_needs_to_hear_of_is_not_said():
    assert tell({"event": "checkpoint.committed"}) == ""


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"cause": "reward_collapse", "subject": "policy", "onset_step": 41, "reason": "fell", "doing": "so"},
            "incident 1: the rewards or the completions changed at about step 41 (fell); so",
        ),
        (
            {"cause": "server_crash", "subject": "batch", "reason": "1 incomplete group", "doing": "so"},
            "incident 1: a batch was rejected (1 incomplete group); so",
        ),
        (
            {"cause": "trainer_crash", "subject": "trainer", "reason": "", "doing": "it is restarted"},
            "incident 1: the trainer crashed; it is restarted",
        ),
        (
            {
                "cause": "verifier_broken",
                "subject": "reward",
                "onset_step": 8,
                "reason": LAST_ATTEMPT_BROKE,
                "doing": "no such batch is trained on",
            },
            f"incident 1: {LAST_ATTEMPT_BROKE}; no such batch is trained on",
        ),
    ],
)
def test_an_incident_is_told_in_one_line(event, line):
    assert tell({"event": "incident.began", "incident": 1, **event}) == line


def test_a_restore_from_before_a_fall_says_how_long_the_run_is_on_probation():
    restored = {"event": "trainer.loaded", "global_step": 29, "next_step": 30}
    said = "steps 30 to 79 are on probation: a fall of the rewards is found sooner"
    assert tell(restored | {"probation_steps": 50}) == said
    assert tell(restored) == tell(restored | {"probation_steps": 0}) == ""


def test_one_that_was_not_mended_says_so_and_a_long_reason_is_cut():
    ended = {"event": "incident.ended", "incident": 2, "subject": "server-0", "reason": "given up", "seconds": 9}
    assert tell(ended | {"is_mended": False}) == "incident 2 was not repaired after 9.0 s: given up"
    began = {"event": "incident.began", "incident": 2, "cause": "server_oom", "subject": "s", "reason": "x" * 500}
    assert len(tell(began | {"doing": "it is restarted"})) < 250


def test_condemning_is_told_with_the_names_and_not_where_only_memory_held_them():
    assert tell({"event": "checkpoint.condemned", "checkpoints": ["a", "b"]}) == "checkpoints condemned: a, b"
    assert tell({"event": "checkpoint.condemned", "checkpoints": []}) == ""
