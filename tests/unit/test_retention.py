"""Retention as the trainer does it: what a restore would need is still there when the damage is found."""

import dataclasses

import pytest

from actors.retention import worth_sparing
from launcher.checkpoints import CheckpointStore
from launcher.config import RecoverConfig, RunConfig
from launcher.messages import Cause, Incident
from launcher.policy.restore import FIRST_WEIGHTS, CheckpointFacts, CheckpointHealth, certify, choose
from launcher.supervision_config import RestoreConfig
from tests.unit.test_checkpoints import save, steps_of

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
