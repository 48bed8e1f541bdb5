"""Retention as the trainer does it: what a restore would need is still there when the damage is found."""

import pytest

from launcher.base.messages import Cause, Incident
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.checkpoints.trial_folders import TrialFolder
from launcher.config.supervision import RestoreConfig
from launcher.policy.checkpoint_status import CheckpointFacts, CheckpointStatus, checkpoint_status, worth_keeping
from launcher.policy.restore import FIRST_WEIGHTS, choose
from tests.support.trial_names import trial_paths
from tests.support.worlds.checkpoints import save, steps_of

SETTINGS = RestoreConfig(good_after_steps=5)


def spared_of(store, healthy_until, *, keep_last=2):
    trial = TrialFolder.of(trial_paths(store.root.parents[4]))
    return CheckpointCatalog(trial, HealthEvidence(settings=SETTINGS)).worth_sparing(
        keep_last, healthy_until=healthy_until
    )


def run_of(store, steps, *, spares=True):
    """A checkpoint after every step, two of them kept."""
    for step in range(steps):
        save(store, step)
        store.prune(2, spare=spared_of(store, step) if spares else frozenset())
    return steps_of(store)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(trial_paths(tmp_path).default_checkpoints)


def restored(steps, onset):
    """The step that is gone back to, where the rewards fell at `onset`."""
    judged = [
        facts_of(step, status=checkpoint_status(step, healthy_until=onset - 2, settings=SETTINGS).status)
        for step in steps
    ]
    incident = Incident(cause=Cause.REWARD_COLLAPSE, subject="policy", reason="fell", since=0.0, onset_step=onset)
    return choose(judged, incident, [], SETTINGS).global_step


@pytest.mark.slow
def test_a_collapse_found_late_finds_a_checkpoint_from_before_it(store):
    assert 0 <= restored(run_of(store, 20), 17) <= 17 - 2 - SETTINGS.onset_margin_steps


def test_by_age_alone_there_would_be_none(store):
    kept = run_of(store, 20, spares=False)
    assert kept == [18, 19]
    assert restored(kept, 17) == FIRST_WEIGHTS


@pytest.mark.slow
def test_what_is_spared_does_not_pile_up(store):
    assert len(run_of(store, 30)) <= 2 + 2 + 1


# ── the best, and what is torn ──


def kept_of(store, rewards, *, keep_last=2):
    for step, reward in enumerate(rewards):
        save(store, step, reward=reward)
        store.prune(keep_last, spare=spared_of(store, step, keep_last=keep_last))
    return steps_of(store)


@pytest.mark.slow
def test_the_best_stays_however_old_it_is(store):
    assert 4 in kept_of(store, [0.1, 0.2, 0.3, 0.4, 0.9, *[0.5] * 25])


def test_of_equals_the_newest_is_the_best(store):
    kept = kept_of(store, [0.5] * 20)
    assert kept == [9, 12, 15, 18, 19]  # two good ones, the next to become one, the newest two: it is among these


def test_a_condemned_one_is_never_the_best():
    condemned = facts_of(3, reward=0.9, status=CheckpointStatus.CONDEMNED)
    assert 3 not in worth_keeping([condemned, facts_of(5, reward=0.1), facts_of(9, reward=0.2)], 1)
    assert worth_keeping([facts_of(3, reward=float("nan")), facts_of(9)], 1) == {3, 9}  # 3: the next to become good


def facts_of(step, *, status=CheckpointStatus.CANDIDATE, reward=None):
    return CheckpointFacts(global_step=step, status=status, reward=reward)


def test_torn_ones_do_not_count_among_the_two_good_ones_that_stay(store):
    for step in range(10):
        save(store, step)
    for step in (4, 3):
        (store.find(step).path / "model.safetensors").write_bytes(b"")
    spared = spared_of(store, 9, keep_last=1)
    assert {1, 2} <= spared
    assert not {3, 4} & spared
