"""The arithmetic of supervision's price: which steps are with it, which blocks make a pair, what the ratio says."""

import argparse

import pytest

from launcher.base.errors import UsageError
from launcher.config.compose import compose
from launcher.config.supervision_checks import find_contradictions
from scripts.faults.started_run import PRESET
from scripts.lab.measured import mean_ratio
from scripts.lab.measured_run import SwitchSchedule
from scripts.lab.overhead import SAME_WORK, measured, pair_up, run

SCHEDULE = SwitchSchedule(first=10, block=4, pairs=20)


def test_each_pair_has_a_block_of_either_kind_and_both_orders_are_drawn():
    firsts = set()
    for pair in range(SCHEDULE.pairs):
        steps = [SCHEDULE.first + 8 * pair + i for i in range(8)]
        on = [SCHEDULE.is_on(step) for step in steps]
        assert sum(on) == 4
        assert len(set(on[:4])) == len(set(on[4:])) == 1
        firsts.add(on[0])
    assert firsts == {True, False}


def test_before_and_after_the_pairs_a_run_is_supervised():
    assert all(SCHEDULE.is_on(step) for step in [*range(10), *range(10 + 160, 200)])
    assert SCHEDULE.steps == 171


def lines(schedule, on_s, off_s):
    """What a run writes whose steps last so long, and 9 s where something is switched."""
    time, metrics, switched = 0.0, [], []
    for step in range(schedule.steps):
        begins = schedule.block_of(step) != schedule.block_of(step - 1)
        if begins:
            cpu = {"coordinator": 0.01 * step}
            switched.append({"step": step, "on": schedule.is_on(step), "gate_s": 0.04, "cpu_s": cpu})
        time += 9.0 if begins else on_s if schedule.is_on(step) else off_s
        metrics.append({"global_step": step, "time": time})
    return metrics, switched


def test_a_step_in_which_something_is_switched_is_in_no_block():
    pairs = pair_up(*lines(SCHEDULE, 1.01, 1.0), SCHEDULE)
    assert len(pairs) == 20
    for on, off in pairs:
        assert on.is_on
        assert not off.is_on
        assert on.step_s == pytest.approx((1.01,) * 3)
        assert off.step_s == pytest.approx((1.0,) * 3)
        assert on.gate_s == pytest.approx(0.01)
        assert on.cpu_s == pytest.approx({"coordinator": 0.01})
        assert (on.lasted_s, off.lasted_s) == (pytest.approx(9 + 3 * 1.01), pytest.approx(9 + 3 * 1.0))
    points = measured(pairs).points
    assert points["overhead"] == [pytest.approx(0.01)]
    assert points["coordinator on_cpu_share"] == pytest.approx([4 * 0.01 / 12.03] * 20), "of the clock's seconds"
    assert points["coordinator off_cpu_share"] == pytest.approx([4 * 0.01 / 12.0] * 20)


def test_a_run_that_repeated_steps_is_not_measured():
    metrics, switched = lines(SCHEDULE, 1.0, 1.0)
    del switched[3]
    with pytest.raises(ValueError, match=r"block 2 goes from step 18 to 26: steps were repeated"):
        pair_up(metrics, switched, SCHEDULE)


def test_the_first_step_of_a_run_is_in_no_block():
    with pytest.raises(UsageError, match="give it 1 or more"):
        run(argparse.Namespace(warm_up=0, block=4, pairs=2, seed=0, overrides=[]))


def test_supervisors_that_stand_still_for_a_block_of_long_steps_are_not_taken_for_hung():
    config = compose([PRESET, *SAME_WORK])
    assert config.health.supervisor_silence_s > 6 * 60.0, "six steps of a minute"
    assert list(find_contradictions(config)) == []


def test_what_is_rare_and_dear_counts():
    ratio = mean_ratio([(1.0, 1.0)] * 19 + [(3.0, 1.0)])
    assert ratio.value == pytest.approx(1.1)
    assert ratio.low <= ratio.value <= ratio.high
