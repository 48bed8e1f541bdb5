"""Figures of a run under faults, from what a run and the injector write. Nothing is timed."""

from dataclasses import replace

import pytest

from launcher.reporting.ledger_audit import audit
from launcher.reporting.run_reader import RunData
from scripts.faults.outcome import outcomes
from scripts.lab.run_measures import run_measures, time_shares


def metrics(step, time, *, reward=0.5, distance=1e-7):
    return {
        "global_step": step,
        "time": time,
        "rollout/reward": reward,
        "timeperf/step_s": 1.0,
        "grpo_actor/logprob_distance/avg": distance,
    }


def lines(*written):
    data = RunData()
    for line in written:
        data.take_step(line)
    return data.log.steps


def measured(standing, *, undone=(), events=(), record=(), exit_code=0, usual_s=None, is_all_known=True):
    ledger = [
        {"global_step": line.step, "prompt_ids": [line.step], "weight_versions": [line.step]} for line in standing
    ]
    found = audit(ledger, [{"global_step": line.step} for line in standing], prompts=100)
    return run_measures(
        standing=standing,
        undone=undone,
        kept_tokens=7.0,
        events=events,
        faults=outcomes(record, events, [(line.time, line.step) for line in (*undone, *standing)]),
        asked=len(record),
        audit=replace(found, not_known=()) if is_all_known else found,
        exit_code=exit_code,
        usual_s=usual_s,
    )


def test_where_part_of_the_ledger_is_not_known_nobody_counts_its_violations():
    standing = lines(*(metrics(step, 10.0 + step) for step in range(20)))
    found = measured(standing, is_all_known=False)
    assert (found["ledger_violations"], found["run_steps"]) == ([], [])
    assert found["prompt_uses"] == [0.0] * 80 + [1.0] * 20
    assert measured([*standing[:5], *standing[6:]], is_all_known=False)["ledger_violations"] == [1.0]


def fired(kind, at, target="server-0"):
    return {"what": "fired", "kind": kind, "target": target, "monotonic": at, "began_monotonic": at}


def test_a_run_without_faults_spends_all_its_time_on_steps_and_raises_no_alarm():
    found = measured(lines(*(metrics(step, 10.0 + step) for step in range(20))))
    assert (found["ettr"], found["semantic_ettr"], found["alarms"]) == ([1.0], [1.0], [0.0])
    assert (found["stale_steps"], found["zero_reward_steps"], found["ledger_violations"]) == ([0.0], [0.0], [0.0])
    assert "lost_steps" not in found, "there was no fault to divide by"


def test_a_wait_and_steps_that_were_undone_are_lost_time_and_are_counted_in_steps():
    undone = lines(metrics(5, 15.0), metrics(6, 16.0))
    standing = lines(*(metrics(step, 10.0 + step) for step in range(5)), *(metrics(s, 22.0 + s) for s in (5, 6, 7)))
    found = measured(standing, undone=undone, record=[fired("T1", 16.5, "trainer"), fired("C1", 27.5)])
    assert found["ettr"] == [pytest.approx(7 / 19)]
    assert found["lost_steps"] == [pytest.approx((19 - 7) / 2)]
    assert "lost_steps T1" not in found, "whose the steps are that were taken twice is not known"
    assert found["steps_undone"] == [2.0]
    assert found["next_step_s"] == [pytest.approx(10.5), pytest.approx(0.5)]


def test_each_fault_has_the_steps_that_were_lost_until_the_next_one():
    times = [10.0, 11.0, 16.0, 17.0, 18.0, 20.0, 21.0, 22.0]
    record = [fired("C1", 11.5), fired("S1", 18.5), fired("C1", 20.5)]
    found = measured(lines(*(metrics(step, time) for step, time in enumerate(times))), record=record)
    assert (found["lost_steps C1"], found["lost_steps S1"]) == (
        [pytest.approx(4), pytest.approx(0)],
        [pytest.approx(1)],
    )
    assert found["lost_steps"] == [pytest.approx(5 / 3)]


def test_steps_on_old_weights_or_on_rewards_of_0_are_lost_for_the_semantic_share_alone():
    standing = lines(
        *(metrics(step, 10.0 + step) for step in range(8)),
        metrics(8, 18.0, distance=8e-4),
        metrics(9, 19.0, reward=0.0),
        metrics(10, 20.0),
    )
    found = measured(standing)
    assert found["ettr"] == [1.0]
    assert found["semantic_ettr"] == [pytest.approx(8 / 10)]
    assert (found["stale_steps"], found["zero_reward_steps"]) == ([1.0], [1.0])


def test_load_that_slows_every_step_changes_the_pace_and_no_share():
    standing = lines(*({**metrics(step, 10.0 + 2 * step), "timeperf/step_s": 2.0} for step in range(5)))
    shares = time_shares(standing, [], bad=0, faults=(), usual_s=0.5)
    assert (shares["ettr"], shares["pace"], shares["usual_step_s"]) == ([1.0], [0.25], [2.0])


def test_a_step_that_a_fault_hit_is_not_usual():
    slow = [{**metrics(step, 10.0 + step), "timeperf/step_s": 9.0} for step in (1, 3, 4)]
    standing = lines(*(metrics(step, 10.0 + step) for step in (0, 2)), *slow)
    found = measured(standing, record=[fired("C1", 10.5), fired("C1", 12.5), fired("C1", 13.5)])
    assert found["usual_step_s"] == [1.0]


def test_a_hang_that_nobody_noticed_has_no_time_and_counts():
    standing = lines(*(metrics(step, 10.0 + step) for step in range(20)))
    suspect = {"event": "health.suspect", "subject": "server-0", "monotonic": 14.0}
    seen = measured(standing, events=[suspect], record=[fired("C2", 12.0)])
    assert (seen["hang_detected_s"], seen["hangs_unnoticed"]) == ([2.0], [0.0])
    unseen = measured(standing, record=[fired("C2", 12.0)])
    assert (unseen["hang_detected_s"], unseen["hangs_unnoticed"]) == ([], [1.0])


@pytest.mark.parametrize("event", ["incident.began", "batch.rejected", "health.dead"])
def test_whatever_reports_trouble_is_an_alarm(event):
    standing = lines(*(metrics(step, 10.0 + step) for step in range(3)))
    quiet = {"event": "checkpoint.committed", "monotonic": 11.0}
    assert measured(standing, events=[quiet, {"event": event, "monotonic": 11.0}])["alarms"] == [1.0]
    at_its_end = [{"event": "run.halting", "monotonic": 12.5}, {"event": event, "monotonic": 12.6}]
    assert measured(standing, events=at_its_end)["alarms"] == [0.0], "a server that the run ends is no alarm"
    again = [*at_its_end, {"event": "run.started", "monotonic": 13.0}, {"event": event, "monotonic": 14.0}]
    assert measured(standing, events=again)["alarms"] == [1.0]


def test_of_a_run_without_two_steps_no_share_is_claimed():
    assert time_shares(lines(metrics(0, 10.0)), [], bad=0, faults=(), usual_s=None) == {}
