"""The gate admits a batch only if every completion is whole, scored and from the weights being trained."""

import dataclasses
import math

import pytest

from launcher.policy.admission import BatchReport, admit
from tests.replay import Replay, prompts

SOUND = BatchReport(
    policy_version=7,
    weight_versions=(7,),
    completions=8,
    without_reward=0,
    empty=0,
    nonfinite_logprobs=0,
    uneven_groups=0,
)


def test_a_sound_batch_is_admitted():
    assert admit(SOUND).admitted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"completions": 0, "weight_versions": ()}, "no completions"),
        ({"without_reward": 1}, "1 completions without a reward"),
        ({"empty": 3}, "3 empty completions"),
        ({"nonfinite_logprobs": 2}, "2 completions with non-finite log-probs"),
        ({"uneven_groups": 1}, "1 groups that are not whole"),
        ({"weight_versions": (6,)}, r"weight versions [6], not 7"),
        ({"weight_versions": (6, 7)}, r"weight versions [6, 7], not 7"),
    ],
)
def test_a_batch_that_a_failure_made_is_rejected_with_its_reason(change, reason):
    decision = admit(dataclasses.replace(SOUND, **change))
    assert not decision.admitted
    assert decision.reason == reason


def spoiled(batch, **change):
    """`batch` with its first rollout changed: fields of the rollout, or of its completion."""
    first = batch.groups[0].rollouts[0]
    of_completion = {k: v for k, v in change.items() if k != "reward"}
    rollout = dataclasses.replace(first, completion=dataclasses.replace(first.completion, **of_completion))
    if "reward" in change:
        rollout = dataclasses.replace(rollout, reward=change["reward"])
    group = dataclasses.replace(batch.groups[0], rollouts=(rollout, *batch.groups[0].rollouts[1:]))
    return dataclasses.replace(batch, groups=(group, *batch.groups[1:]))


class OneTake:
    def take(self, n):
        return [f"p{i:03d}" for i in range(n)]


BATCH = Replay(prompts(4), 2).collect(OneTake(), want=4, weight_version=7)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": None},
        {"reward": math.nan},
        {"token_ids": (), "logprobs": ()},
        {"logprobs": (math.inf,)},
        {"weight_version": 6},
    ],
)
def test_one_bad_completion_is_seen_in_its_batch(change):
    def decide(batch):
        return admit(BatchReport.of(batch, policy_version=7, n_samples=2)).admitted

    assert decide(BATCH)
    assert not decide(spoiled(BATCH, **change))
