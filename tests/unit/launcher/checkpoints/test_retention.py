"""Retention as the trainer does it: what a restore would need is still there when the damage is found."""

import dataclasses

import pytest

from launcher.base.messages import Cause, Incident
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.retention import worth_sparing
from launcher.config.schema import RecoverConfig, RunConfig
from launcher.config.supervision import RestoreConfig
from launcher.policy.restore import FIRST_WEIGHTS, CheckpointFacts, CheckpointHealth, certify, choose, worth_keeping
from tests.unit.launcher.checkpoints.test_checkpoints import save, steps_of

SETTINGS = RestoreConfig(good_after_steps=5)


def run_of(store, steps, *, spares=True):
    """A checkpoint after every step, two of them kept."""
    config = RunConfig(experiment_name="kept", recover=RecoverConfig(freq_steps=1, keep_last=2), restore=SETTINGS)
    for step in range(steps):
        save(store, step)
        store.prune(2, spare=worth_sparing(store, config, healthy_until=step) if spares else frozenset())
    return steps_of(store)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "default")


def restored(steps, onset):
    """The step that is gone back to, where the rewards fell at `onset`."""
    shelf = [
        CheckpointFacts(global_step=step, policy_version=step + 1, health=CheckpointHealth.CANDIDATE) for step in steps
    ]
    judged = [dataclasses.replace(one, health=certify(one, onset - 2, SETTINGS)) for one in shelf]
    incident = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=0.0, onset_step=onset)
    return choose(judged, incident, [], SETTINGS).global_step


def test_a_collapse_found_late_finds_a_checkpoint_from_before_it(store):
    assert 0 <= restored(run_of(store, 20), 17) <= 17 - 2 - SETTINGS.onset_margin_steps


def test_by_age_alone_there_would_be_none(store):
    kept = run_of(store, 20, spares=False)
    assert kept == [18, 19]
    assert restored(kept, 17) == FIRST_WEIGHTS


def test_what_is_spared_does_not_pile_up(store):
    assert len(run_of(store, 30)) <= 2 + 2 + 1


# ── the best, and what is torn ──


def kept_of(store, rewards, *, keep_last=2):
    config = RunConfig(
        experiment_name="kept", recover=RecoverConfig(freq_steps=1, keep_last=keep_last), restore=SETTINGS
    )
    for step, reward in enumerate(rewards):
        save(store, step, reward=reward)
        store.prune(keep_last, spare=worth_sparing(store, config, healthy_until=step))
    return steps_of(store)


def test_the_best_stays_however_old_it_is(store):
    assert 4 in kept_of(store, [0.1, 0.2, 0.3, 0.4, 0.9, *[0.5] * 25])


def test_of_equals_the_newest_is_the_best(store):
    kept = kept_of(store, [0.5] * 20)
    assert kept == [9, 12, 15, 18, 19]  # two good ones, the next to become one, the newest two: it is among these


def test_a_condemned_one_is_never_the_best():
    condemned = facts_of(3, reward=0.9, health=CheckpointHealth.CONDEMNED)
    assert 3 not in worth_keeping([condemned, facts_of(5, reward=0.1), facts_of(9, reward=0.2)], 1)
    assert worth_keeping([facts_of(3, reward=float("nan")), facts_of(9)], 1) == {3, 9}  # 3: the next to become good


def facts_of(step, *, health=CheckpointHealth.CANDIDATE, reward=None):
    return CheckpointFacts(global_step=step, policy_version=step + 1, health=health, reward=reward)


def test_torn_ones_do_not_count_among_the_two_good_ones_that_stay(store):
    config = RunConfig(experiment_name="kept", recover=RecoverConfig(freq_steps=1, keep_last=1), restore=SETTINGS)
    for step in range(10):
        save(store, step)
    for step in (4, 3):
        (store.find(step).path / "model.safetensors").write_bytes(b"")
    spared = worth_sparing(store, config, healthy_until=9)
    assert {1, 2} <= spared and not {3, 4} & spared
