"""The status of a checkpoint at each of its bounds, and which ones may be gone back to."""

import pytest

from launcher.config.supervision import RestoreConfig
from launcher.policy.checkpoint_status import (
    CheckpointFacts,
    CheckpointStatus,
    Damage,
    checkpoint_status,
    newest_first,
)

GOOD, CANDIDATE = CheckpointStatus.GOOD, CheckpointStatus.CANDIDATE
CONDEMNED, UNVERIFIED = CheckpointStatus.CONDEMNED, CheckpointStatus.UNVERIFIED
SETTINGS = RestoreConfig(good_after_steps=10)
DAMAGE = Damage(onset_step=41, first_step=40, reason="rewards fell", source="the incident")


def judged(step, **facts):
    return checkpoint_status(step, **{"healthy_until": 1000, "settings": SETTINGS} | facts)


@pytest.mark.parametrize(
    ("healthy_until", "status", "reason"),
    [
        (40, GOOD, "10 healthy steps after it"),
        (39, CANDIDATE, "9 healthy steps after it, 10 are needed"),
        (30, CANDIDATE, "0 healthy steps after it, 10 are needed"),
        (12, CANDIDATE, "0 healthy steps after it, 10 are needed"),
    ],
)
def test_good_needs_so_many_healthy_steps_and_not_one_more(healthy_until, status, reason):
    found = judged(30, healthy_until=healthy_until)
    assert (found.status, found.reason) == (status, reason)


@pytest.mark.parametrize(
    ("step", "status"),
    [(39, CANDIDATE), (40, CONDEMNED), (41, CONDEMNED), (29, GOOD), (30, CANDIDATE)],
)
def test_damage_condemns_from_its_first_checkpoint_on_and_vouches_for_none_before_it(step, status):
    """Step 39 is the last healthy one: the ten steps after 29 are 30 to 39."""
    assert judged(step, damage=DAMAGE).status is status


def test_what_was_healthy_only_until_before_the_damage_counts_no_further():
    assert judged(25, damage=DAMAGE, healthy_until=34).status is CANDIDATE
    assert judged(24, damage=DAMAGE, healthy_until=34).status is GOOD


@pytest.mark.parametrize(
    ("facts", "status", "reason"),
    [
        ({"set_aside_as": "condemned"}, CONDEMNED, "the run set it aside: it holds damage"),
        ({"set_aside_as": "condemned", "problem": "torn"}, CONDEMNED, "the run set it aside: it holds damage"),
        ({"problem": "torn"}, UNVERIFIED, "it is not complete"),
        ({"problem": "torn", "is_vouched": False}, UNVERIFIED, "it is not complete"),
        ({"is_vouched": False}, UNVERIFIED, "nothing vouches for its content; --verify reads it"),
        ({"is_vouched": False, "set_aside_as": "rewound"}, UNVERIFIED, "nothing vouches for its content"),
        ({"set_aside_as": "rewound"}, UNVERIFIED, "set aside (rewound): what followed it was undone"),
        ({"set_aside_as": "rewound", "damage": DAMAGE}, UNVERIFIED, "set aside (rewound)"),
        ({}, GOOD, "970 healthy steps after it"),
    ],
)
def test_what_speaks_against_it_comes_first_and_is_said(facts, status, reason):
    found = judged(30, **facts)
    assert found.status is status
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("facts", [{"problem": "torn"}, {"is_vouched": False}])
def test_a_checkpoint_of_damaged_weights_is_condemned_whatever_else_is_wrong_with_it(facts):
    assert judged(40, damage=DAMAGE, **facts).status is CONDEMNED


SHELF = [
    CheckpointFacts(global_step=step, status=status)
    for step, status in ((9, GOOD), (29, CANDIDATE), (19, UNVERIFIED), (39, CONDEMNED), (49, GOOD))
]


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({}, [49, 29, 19, 9]),
        ({"condemned": True}, [49, 39, 29, 19, 9]),
        ({"good": True}, [49, 9]),
        ({"good": True, "condemned": True}, [49, 9]),
        ({"before_step": 49}, [29, 19, 9]),
        ({"before_step": 50}, [49, 29, 19, 9]),
        ({"before_step": 0}, []),
        ({"before_step": 30, "good": True}, [9]),
    ],
)
def test_those_that_may_be_gone_back_to_are_the_newest_first(how, steps):
    assert [one.global_step for one in newest_first(SHELF, **how)] == steps
