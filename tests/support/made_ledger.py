"""The files of a run whose steps were made up, by the real queue, records and checkpoints: what an audit reads.

Batches are rejected, single prompts fail, and restores go back to older checkpoints, as drawn from a seed.
"""

import dataclasses
import json
import random
from pathlib import Path

import yaml

from actors.data.dataset import load_records
from actors.data.prompt_queue import PromptQueue
from actors.training.run_position import RunPosition
from launcher.base.messages import StepReport
from launcher.base.prompt_order import weighted_ids
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.manifest import POSITION_FILE
from launcher.config.compose import REPOSITORY
from launcher.config.data import DatasetConfig
from launcher.run_files.journal import append_line, read_lines
from launcher.run_files.run_paths import RunPaths

TRAIN = REPOSITORY / "assets" / "arithmetic" / "train.jsonl"
DATASETS = {"train_dataset": {"path": str(TRAIN), "max_items": 160}}
SEED, SAVED_EVERY = 1, 7


class MadeRun:
    """`take_steps` takes them; `finish` ends the run. Its files are below `root`."""

    def __init__(
        self, root: Path, *, faults=0, total_steps=120, datasets=DATASETS, batch=16, shuffle=True, leaves_out=0.0
    ) -> None:
        """`faults`: the seed of them, 0 for none. `datasets`: settings by key. `leaves_out`: the share of groups."""
        self.paths = RunPaths(fileroot=root, user="ann", experiment_name="exp", trial_name="t0")
        self.paths.prepare()
        self.store = CheckpointStore(self.paths.default_checkpoints)
        self.draw = random.Random(faults)
        self.faults = bool(faults)
        self.batch = batch
        self.total_steps = total_steps
        self.leaves_out = leaves_out
        datasets = {key: DatasetConfig(shuffle=shuffle, **settings) for key, settings in datasets.items()}
        self._write_settings(datasets)
        ids, circles = [], []
        for key, dataset in datasets.items():
            weighted, circle = weighted_ids([one.id for one in load_records(dataset, key=key)], dataset.weight)
            ids += weighted
            circles += [circle] if circle else []
        self.queue = PromptQueue(ids, seed=SEED, shuffle=shuffle, circles=circles)
        self.position = RunPosition()
        self.clock = 1000.0
        self.event("run.started")
        self.event("trainer.started", prompts=len(self.queue), total_steps=total_steps)
        self.event("trainer.restored", global_step=-1)

    def _write_settings(self, datasets):
        further = {key.partition(".")[2]: one for key, one in datasets.items() if "." in key}
        settings = {
            "seed": SEED,
            "train_dataset": dataclasses.asdict(datasets["train_dataset"]),
            "train_datasets": {name: dataclasses.asdict(one) for name, one in further.items()},
            "rollout": {"max_head_offpolicyness": 0},
        }
        self.paths.config.write_text(yaml.safe_dump(settings))

    def event(self, name, **facts):
        self.clock += 1.0
        append_line(self.paths.events, {"time": self.clock, "event": name, "attempt": 1, **facts})

    def take_steps(self, until):
        while self.position.next_step < until:
            what = self.draw.choice(["reject", "fail", "restore", *[""] * 12]) if self.faults else ""
            if what == "restore":
                self._restore()
            else:
                self._step(what)
            if self.position.next_step % SAVED_EVERY == 0 or self.position.next_step == until:
                self.save()

    def _step(self, what):
        taken = self.queue.take_prompts(self.batch)
        if what == "reject":
            self.queue.requeue(taken)
            return
        if what == "fail":
            self.queue.requeue(taken[:1])
            taken = [*taken[1:], *self.queue.take_prompts(1)]
        left_out = [one for one in taken[1:] if self.draw.random() < self.leaves_out]
        self.queue.commit(taken)
        at = self.position
        self.clock = self.clock + 1.0
        self.position = at.after_step(reward=0.5, epoch=self.queue.epoch)
        report = StepReport(
            global_step=at.next_step,
            epoch=at.epoch,
            epoch_step=at.epoch_step,
            attempt=1,
            policy_version=at.next_step + 1,
            time=self.clock,
            prompt_ids=tuple(one for one in taken if one not in left_out),
            filtered_ids=tuple(left_out),
            weight_versions=(at.next_step,),
            rollouts_failed=int(what == "fail"),
            rollouts_retried=0,
            metrics={"rollout/reward": 0.5, "grpo_actor/logprob_distance/avg": 1e-8},
        )
        append_line(self.paths.ledger, report.ledger_line())
        append_line(self.paths.metrics, report.metrics_line())

    def save(self):
        name = self.position.checkpoint_name
        if name is None or self.store.find(name.global_step) is not None:
            return
        staged = self.store.stage(name)
        (staged / POSITION_FILE).write_text(
            json.dumps({"position": self.position.to_json(), "queue": self.queue.state_dict()})
        )
        self.store.commit(
            staged,
            global_step=name.global_step,
            policy_version=self.position.next_step,
            config_fingerprint={},
            health={},
            keep=False,
        )

    def _restore(self):
        """To one of the newest two checkpoints."""
        if not (found := self.store.list()[-2:]):
            return
        checkpoint = self.draw.choice(found)
        self.store.set_aside_after(checkpoint.global_step)
        state = json.loads((checkpoint.path / POSITION_FILE).read_text())
        self.queue.load_state_dict(state["queue"])
        self.position = RunPosition.from_json(state["position"])
        self.event("trainer.restored", global_step=checkpoint.global_step)

    def finish(self, word="finished"):
        self.event(f"run.{word}", global_step=self.position.next_step - 1, reason="done")

    def change(self, file, change):
        """`change` gets all lines of a file and returns those that are to be there."""
        lines = change(list(read_lines(file)))
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
