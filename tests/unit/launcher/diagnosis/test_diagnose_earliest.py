"""The earliest cause wins over what followed from it, and nothing is named that nothing names."""

from launcher.diagnosis.judging.rules import Guess
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.diagnosis.reading.log_records import Kind
from tests.support.made_logs import Made, RunMaker
from tests.support.worlds.diagnosis import CHILD_FAILED, EXIT_CODE, LAUNCHER, diagnosis_of, run_that_stops

SIGNAL = LAUNCHER + "traceback : Signal 9 (SIGKILL) received by PID 4242"
KILLED = (CHILD_FAILED, EXIT_CODE, SIGNAL)
TIMEOUT = "20251111-{at}.000 WorkflowExecutor ERROR: Workflow execution failed: TimeoutError"
EXCEPTION = (
    "[2025-11-11 {at}] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/env/sglang/srt/managers/scheduler.py", line 2012, in event_loop_overlap\nKeyError: 7'
)
EVERY_2_S = "[2025-11-11 {at}] Decode batch, #running-req: 48, #queue-req: 0, "


def cause_of(folder):
    found = diagnosis_of(folder)
    assert found.condition is RunCondition.STOPPED, found.headline
    return found.causes


def test_a_server_that_hung_minutes_before_somebody_killed_the_trainer_is_a_server_hang(tmp_path):
    causes = cause_of(run_that_stops(tmp_path / "run", trainer=[("10:03:00", line) for line in KILLED]))
    assert causes.first.guess is Guess.SERVER_HANG
    assert causes.is_sure
    crash = next(one for one in causes.ranked if one.guess is Guess.TRAINER_CRASH)
    assert any(e.text == "it began 3 min after the server hang" for e in crash.opposing)


def test_a_trainer_that_fails_while_its_server_waits_for_it_is_no_server_hang(tmp_path):
    """What the launcher wrote for an hour afterwards makes the server's silence no longer than it was before."""
    lines = [("10:00:30", line) for line in KILLED]
    causes = cause_of(run_that_stops(tmp_path / "run", trainer=lines, talks_until="11:00:00"))
    assert causes.first.guess is Guess.TRAINER_CRASH
    assert causes.is_sure


def test_a_scheduler_that_raised_is_a_crash_also_where_requests_then_time_out(tmp_path):
    folder = run_that_stops(
        tmp_path / "run", trainer=[("10:30:00", TIMEOUT)] * 8, server=[("10:00:00", EXCEPTION)], talks_until="11:00:00"
    )
    causes = cause_of(folder)
    assert causes.first.guess is Guess.SERVER_CRASH
    assert causes.is_sure
    assert any("exception ended a server" in e.text for e in causes.first.supporting)


def test_a_server_that_raised_after_it_had_hung_is_a_hang(tmp_path):
    folder = run_that_stops(tmp_path / "run", trainer=[("10:20:00", TIMEOUT)] * 8, server=[("10:10:00", EXCEPTION)])
    assert cause_of(folder).first.guess is Guess.SERVER_HANG


def test_a_server_that_ran_out_of_memory_explains_its_crash_in_whatever_file_it_says_so(tmp_path):
    full = "20251111-{at}.000 Launcher ERROR: Decode out of memory. Try to lower your batch size."
    exits = "20251111-{at}.000 SGLangServer INFO: SGLang server http://127.0.0.1:1 exits, returncode=1"
    folder = run_that_stops(tmp_path / "run", trainer=[("10:00:05", full), ("10:00:06", exits)])
    assert cause_of(folder).first.guess is Guess.OUT_OF_MEMORY


# ── SIGKILL ──


def test_one_sigkill_is_one_and_names_no_memory(tmp_path):
    found = diagnosis_of(run_that_stops(tmp_path / "run", trainer=[("10:00:10", line) for line in KILLED]))
    kills = [event for event in found.contents.log_events if "SIGKILL" in event.kind or "kernel" in event.kind]
    assert [(event.kind, event.count, event.facts["pid"]) for event in kills] == [(Kind.KILLED, 1, 4242)]
    assert found.causes.first.guess is Guess.TRAINER_CRASH
    memory = next(one for one in found.causes.ranked if one.guess is Guess.OUT_OF_MEMORY)
    assert not memory.supporting
    assert "memory" not in found.remedy.change
    assert any("dmesg -T" in text for text in found.causes.missing)


def test_a_server_s_sigkill_is_no_evidence_of_memory(tmp_path):
    exits = "20251111-{at}.000 SGLangServer INFO: SGLang server http://127.0.0.1:1 exits, returncode=-9"
    found = diagnosis_of(run_that_stops(tmp_path / "run", trainer=[("10:00:10", exits)]))
    memory = next(one for one in found.causes.ranked if one.guess is Guess.OUT_OF_MEMORY)
    assert found.causes.first.guess is Guess.SERVER_CRASH
    assert not memory.supporting
    assert "SIGKILL" not in found.remedy.change


# ── what was lost ──


def test_what_was_lost_is_counted_once(tmp_path):
    made = Made(fails="crash", onset=60, steps=150, recovers_at=90, back_to=50, groups=8)
    found = diagnosis_of(RunMaker(made).write(tmp_path / "run"))
    assert found.losses == ("steps done twice: 40", "requests given up: 240", "groups dropped: 240")
    refused = [event for event in found.contents.log_events if event.kind is Kind.REFUSED]
    assert sum(event.count for event in refused) == 240


def test_time_without_a_step_is_told_with_the_pauses_it_is_of(tmp_path):
    lines, maker = [], RunMaker(Made(steps=60, plain=True))
    for step in range(60):
        maker.now += 3600 * (step in (20, 40))
        lines += maker.step(step)
    (tmp_path / "trainer.log").write_text("".join(lines))
    assert diagnosis_of(tmp_path).losses == ("2 h 0 min without a step (pauses between steps: 2)",)


def test_a_copy_of_a_log_counts_nothing_twice(tmp_path):
    logs = RunMaker(Made(fails="crash", onset=60)).write(tmp_path / "run")
    once = diagnosis_of(logs).losses
    (logs / "copy.log").write_text((logs / "trainer.log").read_text())
    assert diagnosis_of(logs).losses == once
