"""Which server's weights are others: the distance of each one's tokens, and what the gate makes of it."""

import dataclasses
import math

import pytest

from actors.weights.weight_consistency_check import golden_limit
from launcher.base.messages import Cause
from launcher.config.schema import RunConfig
from launcher.policy.admission import GateRules, StepFigures, UsualValues, admit
from launcher.policy.reward_health import RewardPoint
from tests.support.worlds.health_monitor import batch
from tests.support.worlds.policy import EXACT, ROUNDED, USUAL, changed

CONFIG = RunConfig(experiment_name="exp")
CONFIG.sglang.dtype = CONFIG.actor.dtype = "float32"
GATE = GateRules.of(CONFIG)


@pytest.mark.parametrize(
    ("step", "mean", "shares", "expected"),
    [
        (30, 1e-7, {"server-0": 1e-7, "server-1": 2e-7}, None),
        (30, 4e-4, {"server-0": 1e-7, "server-1": 8e-4}, (Cause.SERVER_STALE, ("server-1",))),
        (30, 8e-4, {}, (Cause.SERVER_STALE, ())),
        (30, 2.0, {"server-0": 4.0, "server-1": 1e-7}, (Cause.SERVER_CORRUPT, ("server-0",))),
        (30, math.nan, {"server-0": math.nan, "server-1": 1e-7}, (Cause.SERVER_CORRUPT, ("server-0",))),
        (400, 1.5, {}, (Cause.SERVER_STALE, ())),  # the first weights may be as far by then
        (30, 9e-6, {"server-0": 1e-7, "server-1": 1e-4}, (Cause.SERVER_STALE, ("server-1",))),
        (30, 1e-5, {"server-0": 1e-7, "server-1": 2e-5}, None),
        (30, 1e-5, {"server-0": 1.5e-5, "server-1": 2.1e-5}, (Cause.SERVER_STALE, ("server-0", "server-1"))),
        (30, 1.1e-5, {"server-0": 1e-5, "server-1": 1.2e-5}, (Cause.SERVER_STALE, ("server-1",))),
        (10, 0.1, {}, (Cause.SERVER_STALE, ())),
        (10, 0.11, {}, (Cause.SERVER_CORRUPT, ())),
        (400, 2.0, {}, (Cause.SERVER_STALE, ())),
        (400, 2.1, {}, (Cause.SERVER_CORRUPT, ())),
        (30, 1e-3, {"server-0": 1e-3, "server-1": 1e-3}, (Cause.SERVER_STALE, ("server-0", "server-1"))),
    ],
)
def test_the_bad_share_is_named_and_old_weights_are_told_from_damaged_ones(step, mean, shares, expected):
    decision = admit(batch(step, logprob_distance=mean, distances=shares), GATE)
    assert decision.admitted is (expected is None)
    if expected is not None:
        assert (decision.cause, decision.subjects) == expected


@pytest.mark.parametrize("usual", [None, dataclasses.replace(USUAL, distance=None)])
def test_in_float32_the_trainer_knows_what_is_usual_where_the_monitor_does_not(usual):
    """A monitor that began again, of a run ahead or one whose logs stayed on another machine, refused every batch of a
    run whose rounding had grown."""
    known = batch(30, logprob_distance=1.6e-5, usual_distance=1.6e-5)
    assert admit(known, GATE, usual=usual).admitted
    assert not admit(dataclasses.replace(known, usual_distance=None), GATE, usual=usual).admitted
    assert not admit(dataclasses.replace(known, logprob_distance=1.1e-4, usual_distance=1.0), GATE).admitted
    assert admit(changed(logprob_distance=0.09, usual_distance=1e-7), ROUNDED).admitted, "this machine may round more"


def test_a_wrong_label_is_stale_whatever_the_distance():
    older = batch(30, weight_versions=(29,), logprob_distance=5.0)
    assert admit(older, GATE).cause is Cause.SERVER_STALE
    assert admit(older, dataclasses.replace(GATE, versions_behind=1)).cause is Cause.SERVER_STALE


@pytest.mark.parametrize(
    ("current", "older", "expected"),
    [
        (1e-7, 0.02, None),  # a version behind by permission
        (4e-4, 0.02, (Cause.SERVER_STALE, ())),  # the label says current: no permission covers it
        (1e-7, 0.2, None),
        (1e-7, 0.21, (Cause.SERVER_STALE, ("server-1",))),
        (1e-7, math.nan, (Cause.SERVER_STALE, ("server-1",))),
    ],
)
def test_what_older_weights_made_does_not_hide_what_current_ones_did_not(current, older, expected):
    gate = dataclasses.replace(GATE, versions_behind=1)
    mixed = batch(30, weight_versions=(29, 30), logprob_distance=current, older=(("server-1", 29, older),))
    decision = admit(mixed, gate)
    assert decision.admitted is (expected is None)
    if expected is not None:
        assert (decision.cause, decision.subjects) == expected


def test_a_distance_of_older_weights_alone_is_not_the_usual_one():
    assert math.isnan(batch(30, weight_versions=(29,), is_of_older=True, logprob_distance=0.02).figures.distance)
    assert batch(30, weight_versions=(29, 30), logprob_distance=1e-7).figures.distance == 1e-7


@pytest.mark.parametrize(
    ("known", "first", "limit"),
    [
        (None, [], 0.1),
        (1e-4, [1e-4], 3e-3),
        (0.02, [0.02], 0.08),  # four times what is usual
        (0.04, [0.001, 0.01, 0.2], 0.1),  # but no more than four times that of the first steps, or what is not known
        (0.04, [0.001, 0.03, 0.2], 0.12),
        (0.04, [], 0.16),
    ],
)
def test_in_bfloat16_the_limit_is_four_times_what_is_usual_and_follows_no_drift(known, first, limit):
    figures = [StepFigures(point=RewardPoint(step=0, mean=0.5, low=0.0, high=1.0), distance=one) for one in first]
    usual = dataclasses.replace(USUAL, distance=known, first_distance=UsualValues.of([], first=figures).first_distance)
    for distance, admitted in ((0.99 * limit, True), (1.01 * limit, False)):
        assert admit(changed(logprob_distance=distance), ROUNDED, usual=usual).admitted is admitted


@pytest.mark.parametrize(
    ("known", "limit"),
    [
        (None, 1e-5),
        (1.3e-7, 1e-5),
        (1.6e-5, 6.4e-5),  # after a hundred steps on rewards that were chance
        (8e-4, 1e-4),  # one step at 3e-4 moved log-probs as far: such a distance is no rounding
    ],
)
def test_in_float32_the_limit_is_four_times_what_is_usual_up_to_ten_times_the_setting(known, limit):
    usual = dataclasses.replace(USUAL, distance=known)
    for distance, admitted in ((0.99 * limit, True), (1.01 * limit, False)):
        assert admit(changed(logprob_distance=distance), EXACT, usual=usual).admitted is admitted
    config = RunConfig(experiment_name="exact")
    config.sglang.dtype = config.actor.dtype = "float32"
    assert golden_limit(config, known) == pytest.approx(limit), "the same for a server that is to get traffic"
    config.actor.dtype = "bfloat16"
    assert golden_limit(config, known) == config.gate.distance_unknown
