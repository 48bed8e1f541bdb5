"""A process that saves, prunes, sets up and takes back without end, in forks that may be killed: `python -m
tests.programs.killed_catalog ours|areal FILEROOT` reads how long each fork may live, one a line.

The real store, retention, certification and set-up, on real checkpoints of a tiny model.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.health_evidence import HealthEvidence
from launcher.checkpoints.manifest import Manifest
from launcher.checkpoints.restore_request import ask_restore, restore_is_asked, withdraw_restore
from launcher.checkpoints.trial_folders import TrialFolder, find_trial
from launcher.config.schema import RecoverConfig, RunConfig
from launcher.config.supervision import RestoreConfig
from launcher.policy.checkpoint_status import CheckpointStatus
from launcher.run_files.journal import append_line
from scripts.checkpoints import areal_setup
from scripts.checkpoints.choosing import read_catalog
from tests.support.trial_names import EXPERIMENT, TRIAL, USER, name_of, trial_paths

REPOSITORY = Path(__file__).parents[2]
KEEP_LAST, GOOD_AFTER = 2, 3
TEMPLATE = "template"
FIRST = 4
"""Checkpoints that lie there before the first fork; so one is good."""


def config_of(root):
    config = RunConfig(experiment_name=EXPERIMENT, trial_name=TRIAL)
    config.cluster.fileroot = str(root)
    config.recover = RecoverConfig(freq_steps=1, keep_last=KEEP_LAST)
    config.restore = RestoreConfig(good_after_steps=GOOD_AFTER)
    return config


def save(root, step):
    """A step's line of the metrics, its checkpoint, and retention, as the trainer does them."""
    paths, template = trial_paths(root), root / TEMPLATE
    point = {"time": time.time(), "global_step": step, "grpo_actor/task_reward/avg": 0.5 + step % 7 / 100}
    append_line(paths.metrics, point | {"grpo_actor/task_reward/min": 0.0, "grpo_actor/task_reward/max": 1.0})
    store, manifest = CheckpointStore(paths.default_checkpoints), Manifest.read(template)
    name = name_of(step)
    with store.staging(name) as staged:
        for file in manifest.files:
            shutil.copyfile(template / file, staged / file)
        edit(staged / "training_state.json", lambda content: content.update(policy_version=step + 1))
        place = {"next_step": step + 1, "last_epoch": name.epoch, "last_epoch_step": name.epoch_step}
        edit(staged / "position.json", lambda content: content["position"].update(place))
        store.commit(
            staged,
            global_step=step,
            policy_version=step + 1,
            config_fingerprint=manifest.config_fingerprint,
            health={"reward_mean": point["grpo_actor/task_reward/avg"]},
            keep=False,
        )
    catalog = CheckpointCatalog(TrialFolder.of(paths), HealthEvidence(settings=config_of(root).restore))
    if restore_is_asked(paths):
        return
    store.prune(KEEP_LAST, spare=catalog.worth_sparing(KEEP_LAST, healthy_until=step))


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def live_ours(root):
    paths = trial_paths(root)
    trial = find_trial(root, USER, EXPERIMENT, TRIAL)
    step = max(checkpoint.global_step for checkpoint in CheckpointStore(paths.default_checkpoints).list())
    while True:
        step += 1
        save(root, step)
        good = [entry for entry in read_catalog(trial).entries if entry.status is CheckpointStatus.GOOD]
        ask_restore(paths, good[-1].checkpoint, why="it is good", condemn_after=None)
        if step % 3 == 0:
            withdraw_restore(paths)


def live_areal(root):
    trial = find_trial(root, USER, EXPERIMENT, TRIAL)
    while True:
        areal_setup.finish(trial)
        trial = find_trial(root, USER, EXPERIMENT, TRIAL)
        catalog = read_catalog(trial)
        entry = random.choice(catalog.entries)
        areal_setup.prepare(catalog, entry)
        if entry.global_step % 2:
            areal_setup.undo(trial)


def main():
    live, root = {"ours": live_ours, "areal": live_areal}[sys.argv[1]], Path(sys.argv[2])
    if sys.argv[1] == "areal":
        import torch.distributed.checkpoint.filesystem
        import torch.distributed.checkpoint.state_dict_saver  # noqa: F401

        import scripts.checkpoints.dcp  # noqa: F401
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                random.seed(line)
                live(root)
            except BaseException:  # noqa: BLE001 - a fork must never go on as its parent
                traceback.print_exc()
                os._exit(1)
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Forks:
    """The test's side."""

    def __init__(self, what, root):
        command = [sys.executable, "-m", "tests.programs.killed_catalog", what, str(root)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen(command, cwd=REPOSITORY, **pipes)
        assert self._process.stdout.readline() == "ready\n"

    def live(self, seconds):
        self._process.stdin.write(f"{seconds}\n")
        assert int(self._process.stdout.readline()) == -signal.SIGKILL

    def close(self):
        self._process.communicate()


if __name__ == "__main__":
    main()
