"""The step loop on real tensors and real files, fed rollouts that depend on prompt and weights alone."""

import json
import math

import pytest

from actors.rollout.live_rollouts import Stopped
from actors.training import run_position
from launcher.base.errors import RolloutError
from launcher.base.messages import EvalReport
from launcher.checkpoints import in_memory_checkpoints
from launcher.config.schema import (
    EvaluatorConfig,
    OptimizerConfig,
)
from launcher.policy.admission import Admission
from tests.support.replay import Replay, as_episodes, prompts
from tests.support.worlds.training import N_PROMPTS, SAMPLES, Trial, identical


@pytest.fixture(autouse=True)
def states_in_memory_are_below_the_test_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tmp_path)


SEVERAL = {"ppo_n_minibatches": 2, "recompute_logprob": True}
NADAM = {"optimizer": OptimizerConfig(type="torch.optim:NAdam"), "ppo_n_minibatches": 2}
LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0}


def same(batch):
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "spoil"),
    [({}, same), (SEVERAL, same), ({}, as_episodes), (LORA, as_episodes), (NADAM, same)],
    ids=["one step a batch", "two", "episodes", "episodes and adapters", "another optimizer"],
)
def test_ten_steps_a_resume_and_ten_more_are_twenty(tmp_path, recipe, spoil):
    def trial(name, **given):
        replayed = Replay(prompts(N_PROMPTS), SAMPLES, spoil=spoil)
        return Trial(tmp_path / name, recipe=recipe, rollouts=replayed, **given)

    whole = trial("whole")
    assert whole.run()
    first = trial("parts", steps=10)
    assert first.run()
    second = trial("parts", resume=True)
    assert second.loop.next_step == 10
    assert second.run()

    assert [r.prompt_ids for r in first.reports + second.reports] == [r.prompt_ids for r in whole.reports]
    assert [r.global_step for r in first.reports + second.reports] == list(range(20))
    identical(second.weights(), whole.weights())
    identical(second.training_state(), whole.training_state())


@pytest.mark.slow
def test_a_stop_between_two_saves_loses_no_step_and_no_prompt(tmp_path):
    whole = Trial(tmp_path / "whole")
    whole.run()
    stopped = Trial(tmp_path / "parts", rollouts=Replay(prompts(N_PROMPTS), SAMPLES, stop_at=7))
    assert not stopped.run()
    assert stopped.store.list()[-1].global_step == 6
    resumed = Trial(tmp_path / "parts", resume=True)
    assert resumed.run()

    assert [r.prompt_ids for r in stopped.reports + resumed.reports] == [r.prompt_ids for r in whole.reports]
    identical(resumed.weights(), whole.weights())


@pytest.mark.slow
def test_every_prompt_is_trained_on_once_in_each_epoch_and_folders_count_from_zero(tmp_path):
    trial = Trial(tmp_path, steps=10)
    trial.run()
    for epoch in (0, 1):
        steps = [r for r in trial.reports if r.epoch == epoch]
        assert sorted(i for r in steps for i in r.prompt_ids) == sorted(prompts(N_PROMPTS))
        assert [r.epoch_step for r in steps] == [0, 1, 2, 3, 4]
    assert [str(c) for c in trial.store.list()] == [
        "epoch0epochstep3globalstep3",  # the next to be certified
        "epoch1epochstep2globalstep7",
        "epoch1epochstep4globalstep9",
    ]
    said = {checkpoint.manifest.health["verdict"] for checkpoint in trial.store.list()}
    assert said == {"UNKNOWN"}, "also saved at the pause for a collapse, they were all called HEALTHY"


def test_without_a_number_of_steps_there_are_as_many_as_its_epochs_have(tmp_path):
    assert Trial(tmp_path, steps=None).loop.total_steps == 5 * 5


def test_what_was_committed_is_saved_when_the_servers_are_lost(tmp_path):
    def publish(version):
        if version == 6:
            raise RolloutError("no server")

    trial = Trial(tmp_path, publish=publish)
    with pytest.raises(RolloutError):
        trial.run()
    assert trial.store.list()[-1].manifest.policy_version == 6


@pytest.mark.slow
def test_a_batch_that_the_gate_turns_away_costs_its_rollouts_and_no_weights(tmp_path):
    asked = []

    def ask(report):
        asked.append((report.weight_versions, math.isfinite(report.logprob_distance)))
        return Admission(admitted=len(asked) != 3, reason="the monitor says no")

    trial = Trial(tmp_path, steps=5, ask=ask)
    assert trial.run()
    assert asked == [((0,), True), ((1,), True), ((2,), True), ((2,), True), ((3,), True), ((4,), True)]
    assert [event["reason"] for event in trial.events("batch.rejected")] == ["the monitor says no"]
    assert sorted(i for r in trial.reports for i in r.prompt_ids) == sorted(prompts(N_PROMPTS))


@pytest.mark.slow
def test_a_loop_paused_at_the_gate_steps_on_as_if_nothing_had_been(tmp_path):
    whole = Trial(tmp_path / "whole", steps=8)
    whole.run()
    trial = None
    paused_at = iter([5])

    def ask(report):
        if report.weight_versions == (5,) and next(paused_at, None):
            trial.loop.request_stop(save=False)
            raise Stopped
        return Admission(admitted=True, reason="sound")

    trial = Trial(tmp_path / "paused", steps=8, ask=ask)
    assert not trial.run()
    assert trial.loop.next_step == 5
    assert [c.global_step for c in trial.store.list()] == [3]  # the rhythm's own: the pause saved nothing
    assert not trial.run(), "it was not allowed to go on"
    trial.loop.allow()
    assert trial.run()
    assert [r.prompt_ids for r in trial.reports] == [r.prompt_ids for r in whole.reports]
    identical(trial.weights(), whole.weights())


@pytest.mark.slow
def test_a_loop_goes_back_to_a_checkpoint_and_to_the_beginning_in_the_same_process(tmp_path):
    whole = Trial(tmp_path / "whole", steps=10)
    whole.run()
    trial = Trial(tmp_path / "back", steps=10)
    first = trial.queue.state_dict()
    assert trial.run()
    checkpointer = trial.loop._checkpointer
    trial.loop.restore(checkpointer.load_step(7).position)
    assert trial.run()
    identical(trial.weights(), whole.weights())
    trial.loop.restore(checkpointer.begin_anew(first).position)
    assert trial.run()
    identical(trial.weights(), whole.weights())
    steps = [r.global_step for r in trial.reports]
    assert steps == [*range(10), 8, 9, *range(10)]


@pytest.mark.slow
def test_the_position_is_plain_json(tmp_path):
    trial = Trial(tmp_path, steps=5)
    trial.run()
    state = json.loads((trial.store.list()[-1].path / "position.json").read_text())
    assert state["position"]["next_step"] == 5
    assert state["queue"]["epoch"] == 1


@pytest.mark.slow
def test_of_many_evaluations_the_first_and_the_newest_go_along(tmp_path, monkeypatch):
    """Each state after a step and each look at the trainer carries them: 10,000 cost 0.1 s a step."""
    monkeypatch.setattr(run_position, "EVALS_KEPT", 3)
    trial = Trial(
        tmp_path, steps=6, evaluator=EvaluatorConfig(freq_steps=1), rollouts=Evaluated(prompts(N_PROMPTS), SAMPLES)
    )
    assert trial.run()
    assert [one.policy_version for one in trial.loop.evals] == [0, 5, 6]
    assert len(trial.events("eval.done")) == 7
    again = Trial(tmp_path, steps=6, resume=True)
    assert [one.policy_version for one in again.loop.evals] == [0, 5, 6]


class Evaluated(Replay):
    def evaluate(self, weight_version):
        return EvalReport(policy_version=weight_version, prompts=1, sampled=0.5, greedy=0.5)
