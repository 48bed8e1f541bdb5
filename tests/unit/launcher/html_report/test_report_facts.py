"""The report's figures are those of the files: when, how long, how many, and what was lost."""

import inspect
import shutil

import pytest

from launcher.html_report.page_facts import page_facts
from launcher.policy import liveness, trainer_liveness
from launcher.reporting.run_facts import read_facts
from launcher.reporting.run_reader import MOST_MEMORY, RunData
from launcher.run_log.incident_facts import SILENCES
from tests.support.made_ledger import MadeRun
from tests.support.report_parts import T0, event, facts, started, step


def test_an_incident_is_timed_from_its_own_beginning():
    data = started([0])
    event(data, "server.died", 23.2, incident=1, subject="server-0", detected_after_s=0.2)
    event(data, "incident.began", 23.5, incident=1, cause="server_crash", subject="server-0", at=23.2, reason="SIGKILL")
    step(data, 1, 30)
    event(data, "incident.ended", 33.2, incident=1, cause="server_crash", is_mended=True, actions=["restarted"])
    (one,) = facts(data).incidents
    assert one.detected_s == pytest.approx(0.3)  # the observer's beginning is earlier than 23.5 - 0.2
    assert one.repaired_s == pytest.approx(10.0)
    assert one.next_step_s == pytest.approx(6.8)
    assert (one.step, one.is_mended, one.steps_back) == (1, True, 0)


def test_a_hang_began_with_its_last_sign_of_life():
    data = started()
    reason = "scheduler stopped for 3.3 s; loading weights for 9.5 s; one-token generation unanswered for 3.0 s"
    event(data, "incident.began", 50, incident=1, cause="server_hang", subject="server-0", at=49.9, reason=reason)
    event(data, "incident.ended", 60, incident=1, cause="server_hang", is_mended=True)
    (one,) = facts(data).incidents
    assert (one.detected_s, one.repaired_s) == pytest.approx((3.3, 13.3))


def test_the_words_for_silence_are_those_of_the_policies():
    said = inspect.getsource(liveness) + inspect.getsource(trainer_liveness)
    assert all(f"{words} for {{" in said for words in SILENCES)


def test_a_collapse_is_timed_from_its_first_bad_step_and_to_the_first_one_after_it_was_told():
    data = started()
    for number in range(10):
        step(data, number, 20 + 10 * number, reward=0.0 if number >= 7 else 0.8)
    event(data, "incident.began", 111, incident=1, cause="reward_collapse", subject="policy", onset_step=7, at=111.0)
    event(data, "trainer.restored", 112, global_step=4, incident=1, reason="from step 4")
    step(data, 5, 130)
    event(data, "incident.ended", 131, incident=1, cause="reward_collapse", is_mended=True)
    told = facts(data)
    (one,) = told.incidents
    assert (one.detected_s, one.next_step_s, one.steps_back) == (21.0, 40.0, 5)
    assert [line.step for line in told.steps] == [0, 1, 2, 3, 4, 5]
    assert [[line.step for line in segment] for segment in told.taken_back] == [[5, 6, 7, 8, 9]]
    assert told.losses.bad_steps == 0  # all of them were taken back


@pytest.mark.parametrize(("onset", "begins_at", "is_over"), [(8, 8, True), (8, 9, False), (None, 9, True)])
def test_an_incident_of_an_ended_attempt_is_over_when_a_later_one_trains_on(onset, begins_at, is_over):
    """The judge was repaired and the run trained on, and its report said 'not repaired' in red to the end. Weights that
    hold the damage end nothing."""
    data = started(range(8))
    told = {"incident": 1, "cause": "verifier_broken", "subject": "reward", "onset_step": onset}
    event(data, "incident.began", 110, at=110, **told)
    event(data, "incident.ended", 140, is_mended=False, reason="the run was over first", **told)
    event(data, "run.errored", 141, reason="the reward function is broken")
    assert (facts(data).incidents[0].is_over, facts(data).incidents[0].outcome) == (False, "not repaired")
    event(data, "run.started", 200, reason="resumed", attempt=2)
    event(data, "trainer.restored", 210, global_step=begins_at - 1, attempt=2)
    step(data, begins_at, 230, attempt=2)
    (one,) = facts(data).incidents
    health = page_facts(facts(data), is_live=False, at=T0)["health"]
    assert (one.is_over, one.repaired_s) == (is_over, None)
    assert one.outcome == ("over, as attempt 2 trained on" if is_over else "not repaired")
    assert health == {"incidents": 1, "mended": 0, "over": int(is_over), "open": 0}


def test_ettr_is_the_share_of_the_time_that_became_steps_that_stand():
    data = started(range(4))
    event(data, "incident.began", 55, incident=1, cause="server_hang", subject="server-0", at=55.0)
    step(data, 4, 90, took=40.0)
    event(data, "incident.ended", 80, incident=1, cause="server_hang", is_mended=True)
    event(data, "run.finished", 100, reason="done")
    losses = facts(data).losses
    assert losses.wall_s == 100.0
    assert losses.ettr == pytest.approx(0.8)
    assert losses.strict == pytest.approx(0.5)  # the step that waited counts as a usual one
    assert losses.semantic == pytest.approx(0.8)
    assert losses.lost_steps_per_incident == pytest.approx(5.0)


def crash(data, at, restored, *, end, attempt=1):
    """The trainer ends, goes back to the step `restored`, and trains again."""
    told = {"incident": 1, "cause": "trainer_crash", "subject": "trainer"}
    event(data, "incident.began", at, at=at, **told)
    event(data, "trainer.restored", end - 1, global_step=restored, attempt=attempt, reason=f"to step {restored}")
    event(data, "incident.ended", end, is_mended=True, attempt=attempt, **told)


def no_fault(data):
    pass


def one_waits(data):
    event(data, "incident.began", 55, incident=1, cause="server_hang", subject="server-0", at=55.0)
    step(data, 4, 90, took=40.0)
    event(data, "incident.ended", 80, incident=1, cause="server_hang", is_mended=True)


def one_is_undone(data):
    crash(data, 52, 2, end=60)
    step(data, 3, 71)


def one_is_left_open(data):
    event(data, "incident.began", 55, incident=1, cause="server_hang", subject="server-0", at=55.0)
    event(data, "run.started", 10_000, reason="resumed", attempt=2)
    step(data, 4, 10_500, attempt=2)


def one_has_no_time(data):
    told = {"incident": 1, "cause": "server_crash", "subject": "server-0"}
    data.log.take_event({"event": "incident.began", "time": None, "attempt": 1, **told})
    event(data, "incident.ended", 55, is_mended=True, **told)


def a_person_goes_back(data):
    event(data, "trainer.restored", 60, global_step=1, reason="to step 1")
    step(data, 2, 71)


def a_person_and_then_a_fault(data):
    a_person_goes_back(data)
    crash(data, 72, 0, end=80)
    step(data, 1, 91)


def another_attempt_follows(data):
    event(data, "run.errored", 60, reason="its node was lost")
    event(data, "run.started", 10_000, reason="resumed", attempt=2)
    crash(data, 58, 3, end=10_010, attempt=2)
    step(data, 4, 10_021, attempt=2)


@pytest.mark.parametrize(
    ("happens", "lost_s"),
    [
        (no_fault, 0.0),
        (one_waits, 30.0),  # 40 s in place of 10; the incident lies within that step
        (one_is_undone, 18.0),  # step 3, and 52 to 60, in which none was under way
        (one_is_left_open, 0.0),  # as far as is known: nothing was written after 55 until another attempt began
        (one_has_no_time, 0.0),  # when it began is not known: the time since the run began is not its
        (a_person_goes_back, 0.0),
        (a_person_and_then_a_fault, 28.0),  # step 1 and the second step 2, and 72 to 80
        (another_attempt_follows, 12.0),  # 58 to 60 and 10,000 to 10,010: nobody knows what the time between them costs
    ],
)
def test_seconds_that_faults_took_are_those_of_incidents_and_of_what_these_undid(happens, lost_s):
    data = started(range(4))
    happens(data)
    assert facts(data).losses.faults_s == pytest.approx(lost_s)


def test_a_price_shows_what_faults_cost_and_without_one_the_page_says_nothing_of_it():
    data = started(range(4))
    one_waits(data)
    event(data, "run.finished", 100, reason="done")
    assert facts(data).cost is None
    assert page_facts(facts(data), is_live=False, at=T0)["cost"] is None
    priced = facts(data, settings={"run": {"price_per_hour": 36.0}})
    said = page_facts(priced, is_live=False, at=T0)
    assert said["cost"] == pytest.approx({"of_faults": 0.3, "of_all": 1.0, "price_per_hour": 36.0})
    assert (said["time"]["faults_s"], said["time"]["wall_s"]) == pytest.approx((30.0, 100.0))


def test_bad_steps_that_still_stand_are_lost_to_the_semantic_measure():
    data = started(range(5))
    event(data, "incident.began", 61, incident=1, cause="verifier_broken", subject="reward", onset_step=3, at=61.0)
    event(data, "run.errored", 100, reason="the reward function is broken")
    told = facts(data)
    assert (told.losses.bad_steps, told.word) == (2, "ERRORED")
    assert told.losses.semantic == pytest.approx(0.3)
    event(data, "incident.began", 99, incident=2, cause="reward_collapse", subject="policy", at=99.0)
    assert facts(data).losses.semantic is None  # nobody knows where that one began


def test_steps_after_a_batch_that_was_turned_away_are_sound():
    """The batch of step 3 was dropped, another took its place: the page said that 2 steps were trained on bad data."""
    told = {"incident": 1, "cause": "reward_collapse"}
    data = started(range(5))
    event(data, "incident.began", 61, **told, subject="policy", onset_step=3, at=61.0)
    assert facts(data).losses.bad_steps == 2, "nobody knows yet"
    event(data, "incident.joined", 61, **told, subject="batch")
    event(data, "incident.ended", 62, **told, is_mended=True, reason="training continues", batches_rejected=1)
    event(data, "run.finished", 100, reason="done")
    losses = facts(data).losses
    assert losses.bad_steps == 0
    assert losses.semantic == losses.ettr


def test_a_restore_takes_steps_back_before_the_first_is_repeated():
    data = started(range(6), every_s=1)
    event(data, "trainer.restored", 40, global_step=3, reason="from step 3")
    event(data, "trainer.restored", 41, global_step=1, reason="from step 1")
    told = facts(data)
    assert [line.step for line in told.steps] == [0, 1]
    assert [one.steps_back for one in told.restores] == [2, 2]


def test_an_incident_has_all_that_its_restores_undid():
    data = started(range(6), every_s=1)
    told = {"incident": 1, "cause": "trainer_crash"}
    event(data, "incident.began", 39, **told, subject="trainer", at=39.0)
    event(data, "trainer.restored", 40, global_step=3, incident=1, reason="from step 3")
    event(data, "trainer.restored", 41, global_step=1, incident=1, reason="from step 1")
    event(data, "incident.ended", 42, **told, is_mended=True)
    assert [one.steps_back for one in facts(data).incidents] == [4]


def test_attempts_are_laid_end_to_end():
    data = started()
    step(data, 0, 50)
    data.take_event({"time": T0 + 10_000, "event": "run.started", "attempt": 2, "reason": "resumed"})
    step(data, 1, 10_060, attempt=2)
    told = facts(data)
    assert told.clock.total_s == 110.0
    assert told.clock.idle_s == 9950.0
    assert [told.clock.at(T0 + at) for at in (25, 5000, 10_030)] == [25.0, 50.0, 80.0]
    assert told.word == ""


def test_the_ledgers_violations_are_told():
    data = started([0, 1, 3], every_s=1)
    event(data, "run.finished", 60, reason="done")
    ledger = page_facts(facts(data), is_live=False, at=T0)["ledger"]
    assert ledger["violations"] > 0
    assert any("steps never committed: [2]" in problem for problem in ledger["problems"])


def test_what_is_not_known_of_the_ledger_is_told(tmp_path):
    run = MadeRun(tmp_path, total_steps=20)
    run.take_steps(20)
    run.finish()
    whole = page_facts(read_facts(run.paths), is_live=False, at=T0)["ledger"]
    assert (whole["problems"], whole["complete_until"], whole["steps"]) == ([], 19, 20)
    assert whole["counts"] == "160 prompts, each exactly twice; 20 of 20 steps"
    assert any("whether the prompts are those of the data set" in what for what in whole["not_known"])
    shutil.rmtree(run.paths.default_checkpoints)
    cut = page_facts(read_facts(run.paths), is_live=False, at=T0)["ledger"]
    assert (cut["problems"], cut["complete_until"]) == ([], None)
    assert any("whether steps or prompts are missing" in what for what in cut["not_known"])


def test_the_step_that_is_being_written_down_is_no_violation():
    data = started([0])
    data.take_ledger({"global_step": 1, "prompt_ids": ["p1"], "weight_versions": [1]})
    assert facts(data).audit.problems == ()
    event(data, "run.errored", 60, reason="full disk")
    assert facts(data).audit.problems == (), "the next attempt writes it"
    event(data, "run.finished", 61, reason="all steps")
    assert "steps without metrics: [1]" in facts(data).audit.problems


def test_what_became_of_checkpoints_is_told():
    data = started()
    for number in (4, 9, 14):
        event(data, "checkpoint.committed", number, global_step=number, seconds=0.1)
    event(data, "checkpoint.pruned", 15, subject="epoch0epochstep4globalstep4", global_step=4)
    event(data, "checkpoint.condemned", 16, checkpoints=["epoch0epochstep14globalstep14.condemned-1"])
    assert {one.step: one.fate for one in facts(data).checkpoints} == {4: "made room", 9: "", 14: "condemned"}


def test_no_peak_of_memory_is_lost_over_a_long_run():
    data = RunData()
    for at in range(5 * MOST_MEMORY):
        used = 90.0 if at == 1234 else 10.0
        data.take_memory({"time": T0 + at, "in_use": {"host memory": [used, 100.0]}})
    assert len(data.memory) <= MOST_MEMORY
    assert max(reading.in_use["host memory"][0] for reading in data.memory) == 90.0
