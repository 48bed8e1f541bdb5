"""SIGKILL at random moments of save, retention and setup_recovery: a good checkpoint is always there, and nothing half
is ever listed as whole. `--kills 100` makes the claim's hundred.
"""

import random
import shutil
from collections import Counter

import pytest
import yaml

from launcher.checkpoints.areal_folders import read_recover_info
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.restore_request import asked_checkpoint
from launcher.checkpoints.trial_folders import find_trial
from launcher.checkpoints.verification import verify
from launcher.policy.checkpoint_status import CheckpointStatus
from scripts.checkpoints import areal_setup
from scripts.checkpoints.choosing import read_catalog
from tests.programs.killed_catalog import FIRST, GOOD_AFTER, TEMPLATE, Forks, save
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, learned, make_areal, make_trial, trial_paths
from tests.support.machine import scaled

MOST_LEFT = 6
"""Beside checkpoints: default/, restore.json, and what the last kill left staged."""


@pytest.fixture
def ours(tmp_path):
    root = tmp_path / "root"
    paths = make_trial(root, learned(tmp_path / "model"), [0])
    shutil.copytree(CheckpointStore(paths.default_checkpoints).find(0).path, root / TEMPLATE)
    shutil.rmtree(paths.default_checkpoints)
    paths.prepare()
    paths.config.write_text(yaml.safe_dump({"restore": {"good_after_steps": GOOD_AFTER}}))
    for step in range(FIRST):
        save(root, step)
    forks = Forks("ours", root)
    yield root, forks
    forks.close()


def test_save_retention_and_setup(ours, kills):
    root, forks = ours
    paths, source, met = trial_paths(root), random.Random(1), Counter()
    newest, wanted = FIRST - 1, kills(6)
    for lived in range(20 * wanted):  # more than wanted where those saved fewer than two
        if lived >= wanted and newest > FIRST:
            break
        forks.live(scaled(source.uniform(0.0, 0.4)))
        leftovers = [path.name for path in (*paths.checkpoints.iterdir(), *paths.default_checkpoints.iterdir())]
        met.update(name.split("-")[0] for name in leftovers if name.startswith("."))
        assert len(leftovers) <= MOST_LEFT + len(CheckpointStore(paths.default_checkpoints).list()), "nothing piles up"
        catalog = read_catalog(find_trial(root, USER, EXPERIMENT, TRIAL))
        proven = [catalog.verified(entry) for entry in catalog.entries]
        assert all(entry.problem == "" for entry in proven), "what is listed is whole"
        assert sum(entry.status is CheckpointStatus.GOOD for entry in proven) >= 1
        assert proven[-1].global_step >= newest
        newest = proven[-1].global_step
        if paths.restore.exists():
            met["asked"] += 1
            assert verify(asked_checkpoint(paths).path).is_complete
    print(f"met after the kills: {dict(met)}; newest step {newest}")
    assert newest > FIRST


@pytest.fixture
def areal(tmp_path):
    root = tmp_path / "root"
    top, info = make_areal(root, [20, 41], recover_step=99)
    forks = Forks("areal", root)
    yield root, top, info, forks
    forks.close()


def test_setup_on_areal_s_folders(areal, kills):
    root, top, info, forks = areal
    source, met = random.Random(2), Counter()
    for _ in range(kills(4)):
        forks.live(source.uniform(0.0, 0.6))
        checkpoint = top / "default" / "recover_checkpoint"
        if info.exists():
            found = read_recover_info(info, checkpoint)
            assert found.problems == ()
            assert found.has_optimizer == (found.name.global_step == 99), "weights and counters of one step"
            met[f"step {found.name.global_step}"] += 1
        else:
            met["nothing to resume from yet"] += 1
        for name in ("epoch0epochstep20globalstep20", "epoch0epochstep41globalstep41"):
            assert verify(top / "default" / name).is_complete
        areal_setup.finish(find_trial(root, USER, EXPERIMENT, TRIAL))
        assert read_recover_info(info, checkpoint).problems == ()
    print(f"met after the kills: {dict(met)}")
