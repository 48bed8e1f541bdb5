"""Rounding of float32 that grows with the weights: no server is accused of it, and one with other weights still is."""

import dataclasses

import numpy as np
import pytest
import torch

from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.processes.loop_thread import LoopThread
from actors.training.run_position import RunPosition
from actors.weights.weight_consistency_check import golden_limit, logprob_distance
from launcher.config.schema import OptimizerConfig, SGLangConfig
from launcher.policy.admission import OF_WEIGHTS
from tests.support.replay import Replay, prompts
from tests.support.truthful_model import TruthfulModel
from tests.support.worlds.training import MODEL, N_PROMPTS, SAMPLES, Trial

GROWN_AFTER = 30
GROWTH = 1.1
"""Of the logits, a step: sixteen times in all, which a run that learns from chance takes a hundred steps for."""
PROMPT = next(iter(prompts(1).values())).token_ids
ANSWER = range(40, 56)


class Server:
    """Has the weights that were published last, and those before, in double precision: what differs is rounding."""

    def __init__(self):
        self.now = self.before = None

    def load(self, weights):
        self.before = self.now
        self.now = TruthfulModel(MODEL)
        for name, tensor in weights.items():
            self.now._weights[name.removeprefix("model.")] = tensor.numpy().astype(np.float64)

    def answers(self, batch, *, is_stale):
        model = self.before if is_stale else self.now
        return dataclasses.replace(batch, groups=tuple(with_logprobs(model, group) for group in batch.groups))


def with_logprobs(model, group):
    rollouts = []
    for rollout in group.rollouts:
        logprobs = tuple(model.logprobs(group.prompt.token_ids, rollout.completion.token_ids))
        completion = dataclasses.replace(rollout.completion, logprobs=logprobs)
        rollouts.append(dataclasses.replace(rollout, completion=completion))
    return dataclasses.replace(group, rollouts=tuple(rollouts))


class World:
    """A run before the gate of a real monitor. From step `stale_at` on the server has the weights before its last."""

    def __init__(self, folder, *, lr, stale_at):
        self.server = Server()
        self.thread = LoopThread("monitor")
        self.stale_at = stale_at
        self.distances = []
        self.decisions = []
        self.trial = Trial(
            folder,
            steps=stale_at + 1,
            rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=self._answered),
            publish=self._publish,
            ask=self._ask,
            memory=False,
            recipe={"optimizer": OptimizerConfig(lr=lr, lr_scheduler_type="constant", warmup_steps=0)},
            sglang=SGLangConfig(dtype="float32"),
        )
        self.trial.config.total_train_epochs = 1000
        self.server.load(self.trial.weights())
        self.monitor = self.thread.call(self._begin())

    async def _begin(self):
        return HealthMonitor(self.trial.config, self.trial.loop._journal, ask=None, series=RewardSeries())

    def _publish(self, version):
        if version < GROWN_AFTER:
            with torch.no_grad():
                self.trial.model._learner.model.model.norm.weight.mul_(GROWTH)
        self.server.load(self.trial.weights())

    def _answered(self, batch):
        return self.server.answers(batch, is_stale=self.trial.loop.next_step >= self.stale_at)

    def _ask(self, report):
        async def judge():
            return self.monitor.admit(report)

        self.decisions.append(self.thread.call(judge()))
        self.distances.append(report.logprob_distance)
        if not self.decisions[-1].admitted:
            self.trial.loop.request_stop()
        return self.decisions[-1]

    def golden_distance(self, model):
        theirs, ours = model.logprobs(PROMPT, ANSWER), self.trial.model.logprobs(PROMPT, ANSWER)
        return logprob_distance(theirs, ours)

    def close(self):
        self.thread.call(self.monitor.close())
        self.thread.close()


@pytest.mark.slow
@pytest.mark.parametrize("lr", [3e-4, 1e-5])
def test_rounding_that_has_grown_past_the_setting_is_let_through_and_weights_one_step_old_are_not(tmp_path, lr):
    """A run that learned from chance at 3e-4 reached 1.6e-5 by rounding alone, and its sound server was called
    stale."""
    world = World(tmp_path, lr=lr, stale_at=GROWN_AFTER + 3)
    try:
        assert not world.trial.run()
        *sound, stale = world.decisions
        assert [one.reason for one in sound if not one.admitted] == []
        assert len(sound) == world.stale_at
        assert 1e-5 < world.distances[-2] < 1e-4, "rounding alone"
        assert not stale.admitted
        assert stale.cause in OF_WEIGHTS

        limit = golden_limit(world.trial.config, world.trial.loop.usual_distance)
        print(f"{lr}: rounding {world.distances[-2]:.1e}, one step {world.distances[-1]:.1e}, limit {limit:.1e}")
        assert world.golden_distance(world.server.now) <= limit < world.golden_distance(world.server.before)
    finally:
        world.close()


def test_the_usual_distance_is_kept_with_the_position_and_unknown_to_older_states():
    position = RunPosition()
    for step in range(25):
        assert (position.usual_distance is None) is (step < 5)
        position = position.after_step(reward=0.5, epoch=0, distance=1e-6 * step)
    position = position.after_step(reward=0.5, epoch=0, distance=None)  # older weights made all of it
    assert position.usual_distance == pytest.approx(14.5e-6)
    kept = position.to_json()
    assert RunPosition.from_json(kept) == position
    del kept["recent_distances"]
    assert RunPosition.from_json(kept).usual_distance is None
