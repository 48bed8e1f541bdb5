"""The gate turns away what a failure made, says why, and lets through what only looks like it."""

import dataclasses
import math

import pytest

from launcher.base.messages import Cause, Incident
from launcher.config.schema import RunConfig
from launcher.config.supervision import GateConfig
from launcher.policy.admission import (
    USUAL_MIN_STEPS,
    USUAL_STEPS,
    BatchReport,
    GateRules,
    StepFigures,
    UsualValues,
    admit,
)
from launcher.policy.canary_policy import CanaryScore
from launcher.policy.reward_health import RewardPoint
from tests.support.replay import Replay, prompts
from tests.support.reward_runs import HEALTHY
from tests.support.worlds.policy import EXACT, ROUNDED, SOUND, USUAL, OneTake, changed, spoiled


@pytest.mark.parametrize("gate", [EXACT, ROUNDED])
@pytest.mark.parametrize("usual", [None, USUAL])
def test_a_sound_batch_is_admitted(gate, usual):
    assert admit(SOUND, gate, usual=usual).admitted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"completions": 0, "weight_versions": ()}, "no completions"),
        ({"without_reward": 1}, "1 completion without a reward"),
        ({"empty": 3}, "3 empty completions"),
        ({"nonfinite_logprobs": 2}, "2 completions with non-finite log-probs"),
        ({"uneven_groups": 1}, "1 incomplete group"),
        ({"canaries": (CanaryScore(name="a", expected=1, got=None),)}, "1 known answer without a reward"),
        ({"weight_versions": (6,)}, r"weight versions [6], not 7"),
        ({"weight_versions": (6, 7)}, r"weight versions [6, 7], not 7"),
        ({"weight_versions": (8,)}, r"weight versions [8], not 7"),
    ],
)
@pytest.mark.parametrize("gate", [EXACT, ROUNDED])
def test_a_batch_that_a_failure_made_is_rejected_with_its_reason(change, reason, gate):
    decision = admit(changed(**change), gate)
    assert not decision.admitted
    assert decision.reason == reason
    assert not decision.is_compared


def test_older_weights_are_admitted_as_far_as_is_allowed_and_newer_never():
    behind_two = dataclasses.replace(EXACT, versions_behind=2)
    assert admit(changed(weight_versions=(5, 6), is_of_older=True, logprob_distance=5e-3), behind_two).admitted
    assert not admit(changed(weight_versions=(5, 6), logprob_distance=5e-3), behind_two).admitted
    older = (("server-0", 5, 5e-3), ("server-0", 6, 2e-3))
    assert admit(changed(weight_versions=(5, 6, 7), logprob_distance=1e-7, older=older), behind_two).admitted
    assert not admit(changed(weight_versions=(5, 6, 7), logprob_distance=5e-3, older=older), behind_two).admitted
    assert admit(changed(weight_versions=(4, 7)), behind_two).cause is Cause.SERVER_STALE
    assert not admit(changed(weight_versions=(8,)), behind_two).admitted


@pytest.mark.parametrize(
    ("change", "gate", "usual", "named"),
    [
        ({"failed": 9}, EXACT, USUAL, "56% of the requests failed (gate.max_failed_share)"),
        ({"logprob_distance": 8.5e-4}, EXACT, USUAL, "0.00085 from the trainer's"),  # one version behind, at least
        ({"logprob_distance": math.nan}, EXACT, USUAL, "gate.distance_float32"),
        ({"logprob_distance": 1.2e-2}, ROUNDED, USUAL, "gate.distance_bfloat16"),  # ten behind
        ({"logprob_distance": 0.2}, ROUNDED, None, "gate.distance_bfloat16"),  # the first weights, in the first batch
        ({"mean_reward": 0.0}, EXACT, dataclasses.replace(USUAL, mean_reward=0.8), "gate.max_reward_jump"),  # S1
        ({"mean_reward": 1.0}, EXACT, dataclasses.replace(USUAL, mean_reward=0.4), "gate.max_reward_jump"),  # S3
        ({"truncated": 128}, EXACT, USUAL, "100% of the completions cut at the token limit"),
        ({"blank": 100}, EXACT, USUAL, "78% of the completions blank"),
    ],
)
def test_each_fault_is_caught_by_its_rule(change, gate, usual, named):
    decision = admit(changed(**change), gate, usual=usual)
    assert not decision.admitted
    assert named in decision.reason


@pytest.mark.parametrize(
    ("change", "gate", "usual"),
    [
        ({"failed": 3}, EXACT, USUAL),  # C8: a fifth of the requests spoiled, and all that came through is whole
        ({"logprob_distance": 6e-6}, EXACT, USUAL),  # float32's own rounding at its worst token
        ({"logprob_distance": 1.7e-3}, ROUNDED, USUAL),  # bfloat16's, the worst of 48 batches
        ({"logprob_distance": 1.5e-2}, ROUNDED, dataclasses.replace(USUAL, distance=1e-2)),  # a large model's usual
        ({"logprob_distance": 2e-2}, ROUNDED, None),  # its first batch
        ({"logprob_distance": None}, EXACT, USUAL),  # asked before the gradients
        ({"mean_reward": 0.26}, EXACT, USUAL),  # a harder batch: pass rate -0.1, and twice its noise
        ({"mean_reward": None}, EXACT, USUAL),  # nothing to compare
        ({"mean_reward": 0.0}, EXACT, None),  # the first batch of a model that can't do it yet
        ({"mean_reward": 0.0}, EXACT, dataclasses.replace(USUAL, mean_reward=0.1)),
        ({"mean_reward": 0.0}, EXACT, dataclasses.replace(USUAL, mean_reward=0.6, reward_noise=0.17)),  # of 8 rollouts
        ({"truncated": 128}, EXACT, None),  # a base model that never ends
        ({"truncated": 128}, EXACT, dataclasses.replace(USUAL, truncated_share=0.7)),  # ten times longer generations
        ({"truncated": 0, "blank": 0}, EXACT, dataclasses.replace(USUAL, truncated_share=1.0)),  # it learned to end
    ],
)
def test_each_trap_is_let_through(change, gate, usual):
    assert admit(changed(**change), gate, usual=usual).admitted


@pytest.mark.parametrize(
    ("off", "change", "gate", "usual"),
    [
        ({"max_failed_share": None}, {"failed": 16}, EXACT, USUAL),
        ({"distance_float32": None}, {"logprob_distance": 1.0}, EXACT, USUAL),
        ({"distance_bfloat16": None}, {"logprob_distance": 1.0}, ROUNDED, USUAL),
        ({"max_reward_jump": None}, {"mean_reward": -0.5}, EXACT, USUAL),
        ({"max_share_jump": None}, {"truncated": 128, "blank": 128}, EXACT, USUAL),
    ],
)
def test_each_rule_is_what_catches_its_fault_and_can_be_switched_off(off, change, gate, usual):
    without = dataclasses.replace(gate, settings=GateConfig(**off))
    assert not admit(changed(**change), gate, usual=usual).admitted
    assert admit(changed(**change), without, usual=usual).admitted


def jumps(points, gate):
    """How many steps of a healthy run the gate would turn away for their mean reward."""
    turned_away = 0
    for at in range(USUAL_MIN_STEPS, len(points)):
        last = points[max(0, at - USUAL_STEPS) : at]
        usual = UsualValues.of([StepFigures(point=point) for point in last])
        turned_away += not admit(changed(mean_reward=points[at].mean), gate, usual=usual).admitted
    return turned_away


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_loses_hardly_a_batch_to_chance(name):
    assert jumps(HEALTHY[name].points(4000, name), EXACT) <= 1


def test_without_its_noise_a_run_of_small_batches_would():
    deaf = dataclasses.replace(EXACT, settings=GateConfig(reward_jump_noise=0.0))
    assert jumps(HEALTHY["plateau at 0.5 with 8 rollouts"].points(4000, 1), deaf) > 4


def test_a_change_that_stays_is_let_through_after_two_batches_but_what_is_certain_never_is():
    fell = changed(mean_reward=0.0)
    usual = dataclasses.replace(USUAL, mean_reward=0.9)
    decisions = [admit(fell, EXACT, usual=usual, compared_in_a_row=n) for n in range(3)]
    assert [d.admitted for d in decisions] == [False, False, True]
    assert decisions[0].is_compared
    assert not admit(changed(empty=1), EXACT, usual=usual, compared_in_a_row=100).admitted


def test_while_damage_is_known_nothing_is_admitted_and_what_is_certain_keeps_its_own_cause():
    known = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=1.0, onset_step=3)
    decision = admit(SOUND, EXACT, incident=known)
    assert (decision.admitted, decision.reason, decision.cause, decision.subjects) == (
        False,
        "fell",
        Cause.REWARD_COLLAPSE,
        ("policy",),
    )
    fell = dataclasses.replace(USUAL, mean_reward=0.9)
    assert admit(changed(mean_reward=0.0), EXACT, usual=fell, incident=known).cause is Cause.REWARD_COLLAPSE
    assert admit(changed(weight_versions=(6,)), EXACT, incident=known).cause is Cause.SERVER_STALE


BATCH = Replay(prompts(4), 2).collect(OneTake(), want=4, weight_version=7)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": None},
        {"reward": math.nan},
        {"token_ids": (), "logprobs": ()},
        {"logprobs": (math.inf,)},
        {"logprobs": (-0.5, math.nan)},
        {"weight_version": 6},
    ],
)
def test_one_bad_completion_is_seen_in_its_batch(change):
    def decide(batch):
        return admit(BatchReport.of(batch, policy_version=7, n_samples=2), EXACT).admitted

    assert decide(BATCH)
    assert not decide(spoiled(BATCH, **change))


def test_a_report_holds_the_least_and_the_greatest_reward_and_their_mean():
    report = BatchReport.of(spoiled(BATCH, reward=-3.0), policy_version=7, n_samples=2)
    rewards = [-3.0, *(rollout.reward for rollout in BATCH.rollouts[1:])]
    assert (report.low_reward, report.high_reward) == (-3.0, max(rewards))
    assert report.mean_reward == pytest.approx(sum(rewards) / 8)
    assert (report.figures.point.low, report.figures.point.high) == (-3.0, max(rewards))


def test_the_usual_range_is_from_the_least_reward_of_all_steps_to_the_greatest():
    points = [RewardPoint(step=n, mean=0.5, low=-1.0 * n, high=0.5 * n) for n in range(3)]
    assert UsualValues.of([StepFigures(point=point) for point in points]).reward_range == 3.0


def test_of_several_faults_the_first_gives_the_cause_and_all_are_said():
    both = admit(changed(without_reward=2, weight_versions=(6,)), EXACT)
    assert (both.cause, both.reason) == (
        Cause.VERIFIER_BROKEN,
        "2 completions without a reward; weight versions [6], not 7",
    )
    stale = admit(changed(weight_versions=(6,), failed=16), EXACT)
    assert (stale.cause, stale.subjects) == (Cause.SERVER_STALE, ())
    far = admit(changed(failed=16, logprob_distance=1.0, distances={"s1": 1.0}), EXACT)
    assert (far.cause, far.subjects) == (Cause.SERVER_CRASH, ())
    alone = admit(changed(logprob_distance=1.0, distances={"s1": 1.0}), EXACT)
    assert alone.subjects == ("s1",)


def test_cut_and_blank_completions_are_counted():
    plain = BatchReport.of(BATCH, policy_version=7, n_samples=2)
    cut = BatchReport.of(spoiled(BATCH, finish_reason="length", text="12"), policy_version=7, n_samples=2)
    assert (plain.truncated, plain.blank) == (0, 8)  # recorded without their texts
    assert (cut.truncated, cut.blank) == (1, 7)
    empty = BatchReport.of(spoiled(BATCH, token_ids=(), logprobs=()), policy_version=7, n_samples=2)
    assert (empty.empty, empty.blank) == (1, 7), "without tokens it is empty, not blank"
    one = changed(completions=1, truncated=1, blank=1)
    assert (one.truncated_share, one.blank_share) == (1.0, 1.0)
    none = changed(completions=0, truncated=0, blank=0, failed=1, requests=1, mean_reward=None)
    assert (none.failed_share, none.truncated_share, none.blank_share) == (1.0, 0.0, 0.0)
    assert math.isnan(none.figures.point.mean)


BEHIND = dataclasses.replace(EXACT, versions_behind=2)
OLDER = {"weight_versions": (5, 6), "is_of_older": True}


def usually(**change):
    return dataclasses.replace(USUAL, **change)


@pytest.mark.parametrize(
    ("gate", "usual", "at_most", "more"),
    [
        (EXACT, USUAL, {"failed": 8}, {"failed": 9}),
        (EXACT, usually(distance=1.3e-7), {"logprob_distance": 1e-5}, {"logprob_distance": 1.01e-5}),
        (ROUNDED, None, {"logprob_distance": 0.1}, {"logprob_distance": 0.101}),
        (ROUNDED, USUAL, {"logprob_distance": 3e-3}, {"logprob_distance": 3.01e-3}),
        (ROUNDED, usually(distance=1e-2), {"logprob_distance": 0.04}, {"logprob_distance": 0.041}),
        (ROUNDED, usually(distance=None), {"logprob_distance": 0.1}, {"logprob_distance": 0.101}),
        (BEHIND, USUAL, OLDER | {"logprob_distance": 0.1}, OLDER | {"logprob_distance": 0.101}),
        (BEHIND, USUAL, {"weight_versions": (5, 7)}, {"weight_versions": (4, 7)}),
        (EXACT, USUAL, {"mean_reward": 1.0}, {"mean_reward": 1.01}),
        (EXACT, usually(reward_range=0.0), {"mean_reward": 0.0}, {"mean_reward": -0.01}),
        (EXACT, usually(reward_range=4.0), {"mean_reward": 2.5}, {"mean_reward": 2.51}),
        (EXACT, usually(reward_noise=0.25), {"mean_reward": 1.75}, {"mean_reward": 1.76}),
        (EXACT, usually(truncated_share=0.25), {"truncated": 96}, {"truncated": 97}),
        (EXACT, usually(blank_share=0.25), {"blank": 96}, {"blank": 97}),
    ],
)
def test_each_limit_from_both_sides(gate, usual, at_most, more):
    assert admit(changed(**at_most), gate, usual=usual).admitted
    assert not admit(changed(**more), gate, usual=usual).admitted


def test_a_reason_names_what_was_wanted_and_the_worst_share():
    assert admit(changed(weight_versions=(4, 7)), BEHIND).reason == "weight versions [4, 7], not 2 behind 7"
    far = admit(changed(logprob_distance=0.5, distances={"s0": 5.0, "s1": math.nan, "s2": 1e-6}), EXACT)
    assert far.reason.startswith("log-probs of s0 and s1 are nan from the trainer's, more than 1e-05")
    assert (far.subjects, far.accused) == (("s0", "s1"), ("s0", "s1"))
    assert admit(changed(failed=1000), EXACT).accused == ()
    known = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=1.0, onset_step=3)
    assert admit(SOUND, EXACT, incident=known).accused == ()


def test_what_is_usual_are_medians_of_what_is_known():
    point = RewardPoint(step=1, mean=0.5, low=0.0, high=1.0)
    first = UsualValues.of([StepFigures(point=point)])
    assert (first.truncated_share, first.blank_share, first.distance, first.reward_noise) == (1.0, 1.0, None, 0.0)
    shares = [(0.1, 0.2, 1e-3), (0.3, 0.4, 3e-3), (math.nan, math.nan, math.nan)]
    steps = [
        StepFigures(point=dataclasses.replace(point, mean=float(n)), truncated_share=t, blank_share=b, distance=d)
        for n, (t, b, d) in enumerate(shares)
    ]
    usual = UsualValues.of(steps)
    assert (usual.mean_reward, usual.truncated_share, usual.distance) == (1.0, 0.2, 2e-3)
    assert usual.blank_share == pytest.approx(0.3)
    assert usual.reward_noise == pytest.approx(math.sqrt(math.pi) / 2)


@pytest.mark.parametrize(("since", "mean"), [(1, 1.0), (math.inf, math.nan)])
def test_after_a_change_only_the_distance_of_the_steps_before_is_usual(since, mean):
    steps = [
        StepFigures(point=RewardPoint(step=n, mean=float(n), low=0.0, high=1.0), blank_share=0.5, distance=2e-3)
        for n in range(2)
    ]
    usual = UsualValues.of(steps, since=since)
    assert (usual.mean_reward, usual.distance) == (pytest.approx(mean, nan_ok=True), 2e-3)
    far = changed(mean_reward=9.0, truncated=128, blank=128)
    assert admit(far, ROUNDED, usual=usual).admitted is (since > 1)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_only_where_both_compute_in_float32_is_a_distance_exact(dtypes):
    config = RunConfig(experiment_name="e")
    config.sglang.dtype, config.actor.dtype = dtypes
    config.rollout.max_head_offpolicyness = 3
    gate = GateRules.of(config)
    assert (gate.is_exact, gate.versions_behind) == (dtypes == ("float32", "float32"), 3)
