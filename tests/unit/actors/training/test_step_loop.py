"""The step loop on real tensors and files, fed rollouts that depend on prompt and weights alone; its gradients."""

import json
import math
from dataclasses import dataclass, replace

import pytest

from actors.model.update_stats import LogprobDistance
from actors.rollout.rollout_engine import Stopped
from actors.training import run_position
from actors.training.admission_gate import AdmissionGate
from actors.training.step_loop import gradients_of
from launcher.base.errors import RolloutError
from launcher.base.messages import Cause, EvalReport, ServerInfo, ServerState
from launcher.base.rollouts import RolloutGroup
from launcher.checkpoints import in_memory_checkpoints
from launcher.config.schema import (
    EvaluatorConfig,
    OptimizerConfig,
    RunConfig,
)
from launcher.policy.admission import Admission, GateRules, admit
from launcher.run_files.journal import Journal
from tests.support.replay import Replay, as_episodes, prompts
from tests.support.worlds.policy import OneTake
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


GOOD, BAD = "http://server-0", "http://server-1"
SERVERS = tuple(
    ServerInfo(name=f"server-{n}", index=n, generation=0, state=ServerState.READY, url=url)
    for n, url in enumerate((GOOD, BAD))
)
MADE = Replay(prompts(4), 2).collect(OneTake(), want=4, weight_version=7)


def by(server, group, reward=None):
    rollouts = [replace(one, completion=replace(one.completion, server=server)) for one in group.rollouts]
    rollouts = rollouts if reward is None else [replace(one, reward=reward) for one in rollouts]
    return RolloutGroup(prompt=group.prompt, rollouts=tuple(rollouts))


def batch(left_out=(BAD, BAD)):
    first, second, *others = MADE.groups
    filtered = tuple(by(server, group, reward=0.0) for server, group in zip(left_out, others, strict=False))
    return replace(MADE, groups=(by(GOOD, first), by(GOOD, second)), filtered=filtered)


@dataclass(frozen=True)
class Stats:
    logprob_distance: LogprobDistance


class Model:
    """`far`: how far each server is; `versions`: of older weights, those that are compared only with today's."""

    def __init__(self, **far):
        self.far = {GOOD: far["good"], BAD: far["bad"]}
        self.asked = []

    def compute_gradients(self, groups):
        self.asked.append(groups)
        (server,) = {one.completion.server for group in groups for one in group.rollouts}
        return Stats(LogprobDistance(mean=self.far[server], max=self.far[server]))


def decide(made, model, tmp_path):
    config = RunConfig(experiment_name="exp")
    config.gconfig.n_samples = 2
    rules, heard = GateRules.of(config), []

    def ask(report):
        heard.append(report)
        return admit(report, rules)

    gate = AdmissionGate(config, Journal(tmp_path / "events.jsonl", attempt=1), ask=ask, servers=lambda: SERVERS)
    assert gate.check(made, policy_version=7, global_step=7).admitted
    return gate.admit(made, gradients_of(model, made)), heard[-1]


def test_a_damaged_server_whose_groups_are_all_flat_is_found_by_its_log_probs(tmp_path):
    """Its garbage earned 0 throughout, so none of it was ever compared: it used up half of the prompts unseen."""
    made, model = batch(), Model(good=1e-7, bad=9.0)
    decision, heard = decide(made, model, tmp_path)
    assert (decision.admitted, decision.cause, decision.accused) == (False, Cause.SERVER_CORRUPT, ("server-1",))
    assert heard.distances == {"server-0": 1e-7, "server-1": 9.0}
    assert model.asked == [made.filtered[:1], made.groups], "one group of it, and what is trained on last"


def test_a_sound_one_is_admitted_and_the_batch_keeps_its_own_figures(tmp_path):
    made, model = batch(), Model(good=2e-7, bad=1e-7)
    decision, heard = decide(made, model, tmp_path)
    assert decision.admitted
    assert (heard.logprob_distance, heard.distances) == (2e-7, {"server-0": 2e-7, "server-1": 1e-7})


def test_nothing_more_is_computed_where_each_server_made_something_that_is_trained_on(tmp_path):
    for made in (batch(left_out=(GOOD, GOOD)), batch(left_out=(f"{GOOD} {BAD}",)), batch(left_out=())):
        model = Model(good=1e-7, bad=9.0)
        assert decide(made, model, tmp_path)[0].admitted
        assert model.asked == [made.groups]


OLD = {(BAD, 6): 0.3}


@pytest.mark.parametrize(
    ("mine", "others", "current", "by_server", "older"),
    [
        ({}, {"older": OLD, "by_server": {BAD: 0.3}}, 0.1, {GOOD: 0.1}, OLD),
        ({"older": {(GOOD, 6): 0.1}, "by_server": {GOOD: 0.1}}, {}, 0.5, {BAD: 0.5}, {(GOOD, 6): 0.1}),
        (
            {"older": {(GOOD, 6): 0.1}, "by_server": {GOOD: 0.1}},
            {"older": OLD},
            None,
            {GOOD: 0.1},
            {(GOOD, 6): 0.1, **OLD},
        ),
        (
            {"older": {(GOOD, 6): 0.2}, "current": 0.1, "by_server": {GOOD: 0.1}},
            {},
            0.1,
            {GOOD: 0.1, BAD: 0.5},
            {(GOOD, 6): 0.2},
        ),
    ],
)
def test_what_older_weights_made_stays_apart_from_what_the_present_ones_did(mine, others, current, by_server, older):
    """As of one batch that has them all: `current` and `by_server` are of the present weights, where those made any."""
    mine, others = LogprobDistance(mean=0.1, max=0.1, **mine), LogprobDistance(mean=0.5, max=0.5, **others)
    both = mine.beside(others, makers=[GOOD], other_makers=[BAD])
    assert (both.mean, both.current, both.by_server, both.older) == (0.1, current, by_server, older)
