"""Real checkpoints of tiny models, ways to damage them, and AReaL's folders with its own names and files."""

import json
import os
import pickle
import shutil
import time
import warnings
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.training.run_position import RunPosition
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.manifest import Manifest, record_files
from tests.support.tiny_models import actor, make_groups, make_model, reference
from tests.support.trial_names import EXPERIMENT, STEPS_PER_EPOCH, TRIAL, USER, name_of, trial_paths

__all__ = ["EXPERIMENT", "TRIAL", "USER", "name_of", "trial_paths"]  # others take them from here


def learned(folder, kind="qwen2", *, dtype="float32", seed=0, recipe=None, **settings):
    """A model after one optimizer step. `recipe`: settings of its training; the others are of its shape."""
    make_model(folder, kind, seed=seed, **settings)
    model = PolicyModel(
        actor(folder, dtype=dtype, **(recipe or {})), reference(folder, dtype), temperature=1.0, total_steps=10
    )
    model.compute_gradients(make_groups(seed=seed))
    model.commit()
    return model


def save(store, model, step, *, reward=0.5, experiment=EXPERIMENT, trial=TRIAL, keep=False, batch_size=16):
    """As the Checkpointer does it."""
    name = name_of(step)
    model.policy_version = step + 1
    queue = PromptQueue(["p0", "p1", "p2"], seed=1, shuffle=True)
    position = RunPosition(next_step=step + 1, last_epoch=name.epoch, last_epoch_step=name.epoch_step)
    with store.staging(name) as staged:
        model.save(staged)
        state = {"position": position.to_json(), "queue": queue.state_dict()}
        (staged / "position.json").write_text(json.dumps(state))
        return store.commit(
            staged,
            global_step=step,
            policy_version=step + 1,
            config_fingerprint={
                "experiment_name": experiment,
                "trial_name": trial,
                "train_dataset.batch_size": batch_size,
            },
            health={"reward_mean": reward, "verdict": "HEALTHY"},
            keep=keep,
        )


def make_trial(root, model, steps):
    """A trial of ours with a checkpoint of each of these steps."""
    paths = trial_paths(root)
    paths.prepare()
    store = CheckpointStore(paths.default_checkpoints)
    for step in steps:
        save(store, model, step)
    return paths


def write_rewards(paths, rewards, *, events=()):
    """metrics.jsonl with these mean rewards from step 0 on, one second apart, and events (dicts) at their `time`."""
    lines = [
        {
            "global_step": step,
            "time": 1000.0 + step,
            "attempt": 1,
            "grpo_actor/task_reward/avg": reward,
            "grpo_actor/task_reward/min": 0.0,
            "grpo_actor/task_reward/max": 1.0 if reward else 0.0,
        }
        for step, reward in enumerate(rewards)
    ]
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths.events.write_text("".join(json.dumps({"attempt": 1, **event}) + "\n" for event in events))


# ── damage ──


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def reseal(folder, **changes):
    """A manifest that agrees with what lies there now: damage from before the save."""
    manifest = Manifest.read(folder)
    made = msgspec.structs.replace(manifest, files=record_files(folder), **changes)
    (folder / "manifest.json").unlink()  # in place it would be written into each hard link of it
    (folder / "manifest.json").write_bytes(made.encode())


def edit_tensors(folder, file, change):
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    reseal(folder)


def edit_json(folder, file, change):
    path = folder / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    reseal(folder)


# ── AReaL ──

FREQUENCY = {
    "frequence_seconds": None,
    "frequency_steps": 5,
    "start_time": 1795198410.49503,
    "steps": 100,
    "last_time": 1795198673.134407,
    "last_steps": 100,
    "interval_steps": 5,
    "interval_seconds": 8.514096,
    "initial_value": False,
}
LOADER = {"_num_yielded": 23, "_sampler_iter_state": {"samples_yielded": 184}, "_iterator_finished": False}


class NotToBeLoaded:
    """Whoever unpickles it finds out: a file appears."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def make_export(folder, seed=0, **settings):
    return make_model(folder, seed=seed, **settings)


def make_areal(root, steps, *, recover_step=None, layout="user", trap=None, optimizer=True, rewards=(), trial=TRIAL):
    """A trial of AReaL's: exports, and the recover files that it writes; returns (trial's folder, recover_info)."""
    inner = Path(EXPERIMENT) / trial
    top = root / "checkpoints" / (Path(USER) / inner if layout == "user" else inner)
    for step in steps:
        make_export(top / "default" / str(name_of(step)), seed=step)
    info = (root / "recover" / inner if layout == "recover" else top) / "recover_info"
    if recover_step is not None:
        info.mkdir(parents=True)
        name = name_of(recover_step)
        frequency = {part: FREQUENCY | {"steps": recover_step + 1} for part in ("epoch", "step", "time")}
        frequency["epoch"] |= {"frequency_steps": 1, "steps": name.epoch, "last_steps": name.epoch}
        for file in ("saver_info.json", "evaluator_info.json", "checkpoint_info.json"):
            (info / file).write_text(json.dumps(frequency))
        (info / "stats_logger_info.json").write_text(json.dumps({"last_commit_step": recover_step - 1}))
        loader = [LOADER] if trap is None else [LOADER, NotToBeLoaded(trap)]
        (info / "dataloader_info.pkl").write_bytes(pickle.dumps(loader))
        make_dcp(top / "default" / "recover_checkpoint", optimizer=optimizer)
        step = {"epoch": name.epoch, "epoch_step": name.epoch_step, "global_step": recover_step}
        (info / "step_info.json").write_text(json.dumps(step | {"steps_per_epoch": STEPS_PER_EPOCH}))
    if rewards:
        write_areal_log(root / "logs" / USER / inner / "trainer.log", rewards)
    return top, info


def make_dcp(folder, *, optimizer):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    folder.mkdir(parents=True)
    state = {"model": {"model.norm.weight": torch.ones(16)}}
    if optimizer:
        state["optim"] = {"state": {"model.norm.weight": {"exp_avg": torch.zeros(16)}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process is what is meant
        save_dcp({"dcp": state}, storage_writer=FileSystemWriter(folder), no_dist=True)


def write_areal_log(file, rewards):
    """`rewards`: from step 0 on, or by step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for step, reward in rewards.items() if isinstance(rewards, dict) else enumerate(rewards):
        at = time.strftime("%Y%m%d-%H:%M:%S", time.gmtime(1.79e9 + step))
        epoch, epoch_step = divmod(step, STEPS_PER_EPOCH)
        lines += [
            f"\x1b[92m(AReaL) {at}.037 StatsLogger INFO: Epoch {epoch + 1}/2 Step {epoch_step + 1}/{STEPS_PER_EPOCH} "
            f"Train step {step + 1}/160 done.\x1b[0m",
            "│ ppo_actor/seq_len/avg │  3.1562e+01 │ ppo_actor/task_reward/avg           │ " + f"{reward:.4e} │",
            "│ ppo_actor/task_reward/min │  0.0000e+00 │ ppo_actor/task_reward/max │ " + f"{float(reward > 0):.4e} │",
        ]
    file.write_text("\n".join(lines) + "\n")
    os.utime(file, (1.79e9, 1.79e9))  # of a run that ended long ago


def snapshot(folder):
    """Every file below with its bytes; folders as None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def copied(folder, target):
    shutil.copytree(folder, target)
    return target
