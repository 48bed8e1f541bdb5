"""Benchmark `ahead`: what it reads from metrics.jsonl, and the ratio that it prints."""

import os
import time

import pytest

from actors.model.policy_model import PolicyModel
from launcher.base.errors import UsageError
from launcher.base.rollouts import Prompt
from launcher.config.compose import compose
from launcher.run_files.journal import Journal
from scripts.benchmark.ahead import PRESET, WARM_UP, AheadRun, apart, compared, measured, read_run, simulated
from scripts.benchmark.made_data import aged_rollouts
from scripts.benchmark.made_data.aged_rollouts import Sampler, learn


def lines(steps, *, every_s):
    return [{"time": every_s * step, "rollout/tokens": 100, "rollout/reward": step / steps} for step in range(steps)]


def test_steps_after_the_warm_up_are_measured():
    run = read_run(1, lines(WARM_UP + 5, every_s=2.0))
    assert run.step_s == (2.0,) * 4 and run.tokens_per_s == 50.0 and len(run.reward) == WARM_UP + 5


def test_too_few_steps_are_refused():
    with pytest.raises(UsageError, match="give more --steps"):
        read_run(0, lines(WARM_UP, every_s=1.0))


def test_each_is_compared_with_the_one_that_makes_nothing_ahead():
    def run(ahead, step_s):
        return AheadRun(ahead=ahead, step_s=(step_s,) * 3, reward=(0.5,) * 20, tokens_per_s=1.0)

    found = measured([run(0, 3.0), run(2, 2.0), run(0, 6.0), run(2, 4.0)])
    assert found.ratios["steps a minute, 2 ahead ÷ 0"].value == pytest.approx(1.5)
    assert found.points["2 ahead: step_s"] == [2.0] * 3 + [4.0] * 3


@pytest.mark.slow
def test_older_tokens_are_compared_in_turns_with_a_step_that_compares_none():
    few = ["train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=4"]
    found = compared(2, few)
    assert {name: len(figures) for name, figures in found.points.items()} == {
        "not compared: step_s": 2,
        "compared: step_s": 2,
    }
    assert found.ratios["a trainer's step, compared ÷ not"].value > 0


FEW = ["train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=4", "valid_dataset.max_items=2"]
MOVES = ["actor.entropy_coeff=1", "actor.optimizer.warmup_steps=0"]
"""Whatever the rewards are."""


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_made_batch_is_of_weights_that_are_so_many_versions_old(tmp_path, monkeypatch, ahead):
    made_by, load = [], Sampler.load

    def loads(sampler, weights):
        made_by.append(sum(one.double().sum().item() for one in weights.values()))
        load(sampler, weights)

    monkeypatch.setattr(aged_rollouts.Sampler, "load", loads)
    journal = Journal(tmp_path / "events.jsonl", 1, time.time)
    run = learn(compose([PRESET, *FEW, *MOVES]), journal, ahead=ahead, steps=4)
    assert len(run.reward) == 4
    versions = [sorted(set(made_by), key=made_by.index).index(one) for one in made_by]
    assert versions == ([0, 1, 2, 3, 4] if ahead == 0 else [0, 0, 0, 1, 2]), "the last are those of the held-out"


@pytest.mark.slow
def test_its_log_probs_are_those_of_the_model_that_learns():
    config = compose([PRESET, "gconfig.max_new_tokens=24"])
    policy = PolicyModel(config.actor, config.ref, temperature=1.0, total_steps=1)
    sampler = Sampler(config, policy)
    prompts = [
        Prompt(id=text, token_ids=tuple(policy.tokenizer(text).input_ids), record={"answer": "#### 9"})
        for text in ("4+5+4=", "1+1=", "33+2+10=?")
    ]
    groups = sampler.groups(prompts, 3, seed=1)
    assert [group.prompt.id for group in groups] == [one.id for one in prompts]
    ended = 0
    for group in groups:
        for rollout in group.rollouts:
            made = rollout.completion
            known = policy.logprobs(group.prompt.token_ids, made.token_ids)
            assert made.logprobs == pytest.approx(known, abs=2e-5)
            ended += made.finish_reason == "stop"
            assert (made.finish_reason == "stop") == (made.token_ids[-1] in sampler._ends)
    assert ended


@pytest.mark.slow
def test_without_a_step_that_is_older_both_learn_the_same():
    found = simulated(1, [0, 1], 1, [*FEW, *MOVES])
    (none,), (one,) = (
        found.points["0 ahead: reward of the last 10 steps"],
        found.points["1 ahead: reward of the last 10 steps"],
    )
    assert none == one
    assert len(found.raw) == 2


def test_apart_this_process_and_what_it_starts_leave_half_of_the_processors_to_the_servers(monkeypatch):
    bound = [{0, 1, 2, 3}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, processors: bound.append(set(processors)))
    with apart(True) as generating:
        assert (generating, bound[-1]) == ({0, 1}, {2, 3})
    assert bound[-1] == {0, 1, 2, 3}
    with apart(False) as generating:
        assert (generating, bound[-1]) == (set(), {0, 1, 2, 3})
    bound.append({7})
    with pytest.raises(UsageError, match="two processors"), apart(True):
        pass
