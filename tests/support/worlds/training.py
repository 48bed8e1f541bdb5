"""A trainer's loop on the asset's model, with checkpoints and steps ahead."""

import asyncio
import dataclasses
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from actors.data.prompt_queue import PromptQueue
from actors.model.policy_model import PolicyModel
from actors.processes.loop_thread import LoopThread
from actors.rollout.rollout_stream import RolloutStream
from actors.training.admission_gate import AdmissionGate
from actors.training.checkpointing import Checkpointer
from actors.training.step_loop import GrpoLoop
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.config.schema import ActorConfig, DatasetConfig, GenerationConfig, RecoverConfig, RefConfig, RunConfig
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.replay import Replay, group, prompts

MODEL = Path(__file__).parents[3] / "assets" / "arithmetic" / "model"
N_PROMPTS = 24
BATCH = 5
SAMPLES = 3


class Trial:
    """One launch of the loop over the folders of a trial."""

    def __init__(
        self,
        root,
        *,
        steps=20,
        rollouts=None,
        resume=False,
        publish=lambda version: None,
        ask=None,
        memory=True,
        recipe=None,
        **settings,
    ):
        self.config = RunConfig(
            experiment_name="loop",
            seed=3,
            total_train_epochs=5,
            total_train_steps=steps,
            train_dataset=DatasetConfig(path="none", batch_size=BATCH),
            gconfig=GenerationConfig(n_samples=SAMPLES, max_new_tokens=16),
            actor=ActorConfig(path=str(MODEL), dtype="float32", device="cpu", threads=1, **(recipe or {})),
            recover=RecoverConfig(freq_steps=4, first_steps=None, keep_last=2, memory=memory, memory_share=1.0),
            **settings,
        )
        self.config.cluster.fileroot = str(root)
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        self.reports = []
        self.store = CheckpointStore(self.paths.default_checkpoints)
        self.queue = PromptQueue([*prompts(N_PROMPTS)], seed=3, shuffle=True)
        ref = RefConfig(path=str(MODEL), dtype="float32")
        self.model = PolicyModel(self.config.actor, ref, temperature=1.0, total_steps=20)
        journal = Journal(self.paths.events, 1, time.time)
        checkpointer = Checkpointer(self.config, self.paths, journal, self.model, self.queue)
        self.loop = GrpoLoop(
            self.config,
            model=self.model,
            queue=self.queue,
            rollouts=rollouts or Replay(prompts(N_PROMPTS), SAMPLES),
            publish=publish,
            checkpointer=checkpointer,
            record=lambda report, _: self.reports.append(report),
            journal=journal,
            attempt=1,
            gate=AdmissionGate(self.config, journal, ask=ask),
        )
        if resume:
            newest = self.store.latest_complete().checkpoint
            self.restored = checkpointer.load(newest.path)
            self.loop.restore(self.restored.position)

    def run(self):
        return self.loop.run()

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.named_weights(torch.float32)}

    def training_state(self):
        return {p.name: load_file(p) for p in self.store.list()[-1].path.glob("*.safetensors")}

    def events(self, name):
        return [line for line in read_lines(self.paths.events) if line["event"] == name]


def identical(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, dict):
            identical(value, right[name])
        else:
            assert torch.equal(value, right[name]), name


AHEAD = 2


class AheadReplay(Replay):
    """Rollouts of the weights that were current when their prompt was taken; all that was taken is made in time."""

    def __init__(self, *, ahead=AHEAD, most_batches=None):
        super().__init__(prompts(N_PROMPTS), SAMPLES)
        self.ahead = ahead
        self.most_batches = most_batches
        self.thread = LoopThread("ahead")
        self.stream = None
        self.generated = 0

    def collect(self, queue, *, want, weight_version):
        return self.thread.call(self._collect(queue, want, weight_version))

    async def _collect(self, queue, want, version):
        if self.stream is None:
            self.stream = RolloutStream(
                self._make,
                queue,
                self._items,
                n_samples=SAMPLES,
                concurrent_prompts=3,
                attempts=3,
                scored_by="",
                ahead=self.ahead,
                newest=lambda: version,
                most_batches=self.most_batches,
            )
        batch = await self.stream.next_batch(want, version=version)
        if self.stream._running:
            await asyncio.wait(self.stream._running)
        return batch

    async def _make(self, prompt, weights, tally, kept):
        self.generated += not kept
        made = group(prompt, SAMPLES, kept[0].weight_version if kept else weights.oldest)
        assert not kept or [one.completion for one in made.rollouts] == list(kept)
        return made


def poison(version, at=0, **change):
    """Changes one completion of the batch at `version`, in the group `at`, once."""
    left = [True]

    def spoil(batch):
        if not left or batch.weight_versions != (version,):
            return batch
        left.clear()
        rollout = batch.groups[at].rollouts[0]
        inner = {k: v for k, v in change.items() if k != "reward"}
        if "logprobs" in inner:
            inner["logprobs"] = (inner["logprobs"],) * len(rollout.completion.token_ids)
        spoiled = dataclasses.replace(rollout, completion=dataclasses.replace(rollout.completion, **inner))
        if "reward" in change:
            spoiled = dataclasses.replace(spoiled, reward=change["reward"])
        groups = list(batch.groups)
        groups[at] = dataclasses.replace(groups[at], rollouts=(spoiled, *groups[at].rollouts[1:]))
        return dataclasses.replace(batch, groups=tuple(groups))

    return spoil


MOST = 2


def trial(root, *, ahead=0, rollouts=None, **settings):
    replayed = rollouts or AheadReplay(ahead=ahead, most_batches=MOST)
    recipe = {"use_decoupled_loss": ahead > 0, "dynamic_sampling": MOST}
    made = Trial(root, rollouts=replayed, recipe=recipe, **settings)
    made.config.rollout.max_head_offpolicyness = ahead
    made.loop._gate._rules = type(made.loop._gate._rules).of(made.config)
    return made
