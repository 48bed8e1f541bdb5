"""P12: what two restores in a row show together, where each alone shows too little."""

import pytest

from actors.monitoring.reward_series import RewardSeries
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.admission import StepFigures
from launcher.policy.reward_health import RewardPoint

SETTINGS = RewardHealthConfig()


def point(step, mean):
    return RewardPoint(step=step, mean=mean, low=0.0, high=1.0)


def take(series, until):
    for step in range(series.next_step, until + 1):
        usual = point(step, 0.5 + 0.04 * (-1) ** step)
        series.admitted(StepFigures(point=usual, truncated_share=0.0, distance=0.0))


@pytest.mark.parametrize(
    ("between", "second", "low", "is_believed"),
    [([], 9, 0.12, True), ([], 29, 0.25, False), ([0.5], 9, 0.12, False)],
    ids=["an older checkpoint", "a later one, of another fall", "the first earned what it did"],
)
def test_two_restores_that_both_earn_too_little_are_one_cause_outside(between, second, low, is_believed):
    series = RewardSeries()
    take(series, 39)
    series.restored(19, 20)
    for mean in [0.16, *between]:
        assert series.contradicted(point(20, mean), None, SETTINGS) == "", "alone it is too little"
    take(series, 35)
    series.restored(second, second + 1)
    reason = series.contradicted(point(second + 1, low), None, SETTINGS)
    assert bool(reason) is is_believed
    assert ("as after the restore before it" in reason) is is_believed


def test_several_batches_after_one_restore_are_no_second_restore():
    series = RewardSeries()
    take(series, 39)
    series.restored(19, 20)
    assert [series.contradicted(point(20, 0.16), None, SETTINGS) for _ in range(3)] == ["", "", ""]
