"""The step loop with dynamic sampling: a resume is exact, an epoch ends with its data, and zeros alone are an alarm."""

import pytest

from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.processes.loop_thread import LoopThread
from launcher.base.rollouts import RolloutGroup
from launcher.reporting.ledger_audit import audit
from tests.support.replay import group, prompts
from tests.support.worlds.training import BATCH, MOST, N_PROMPTS, SAMPLES, AheadReplay, identical, trial


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_five_steps_a_resume_and_five_more_are_ten_though_groups_are_replaced(tmp_path, ahead):
    whole = trial(tmp_path / "whole", ahead=ahead, steps=10)
    assert whole.run()
    first = trial(tmp_path / "parts", ahead=ahead, steps=5)
    assert first.run()
    second = trial(tmp_path / "parts", ahead=ahead, steps=10, resume=True)
    assert second.run()

    reports = first.reports + second.reports
    assert [(r.prompt_ids, r.filtered_ids) for r in reports] == [(r.prompt_ids, r.filtered_ids) for r in whole.reports]
    for part in (first, second):
        assert any(r.filtered_ids and len(r.prompt_ids) == BATCH for r in part.reports), "some were replaced"
    identical(second.weights(), whole.weights())
    identical(second.training_state(), whole.training_state())


@pytest.mark.slow
def test_the_run_ends_when_its_epochs_are_used_up_and_the_ledger_says_what_was_left_out(tmp_path):
    one = trial(tmp_path, steps=None)
    one.config.total_train_epochs = 2
    assert one.run()
    assert one.loop.total_steps == len(one.reports) < 2 * one.loop.steps_per_epoch
    lines = [report.ledger_line() for report in one.reports]
    found = audit(lines, [report.metrics_line() for report in one.reports], prompts=N_PROMPTS)
    assert (found.problems, found.prompts) == ((), N_PROMPTS)
    assert found.filtered == sum(len(r.filtered_ids) for r in one.reports) > 0
    assert sum(len(r.prompt_ids) for r in one.reports) + found.filtered == 2 * N_PROMPTS
    assert [r.metrics.get("rollout/filtered", 0.0) for r in one.reports] == [len(r.filtered_ids) for r in one.reports]
    for epoch in (0, 1):
        used = [i for r in one.reports if r.epoch == epoch for i in (*r.prompt_ids, *r.filtered_ids)]
        assert sorted(used) == sorted(prompts(N_PROMPTS))


class Zeros(AheadReplay):
    """A reward function that answers 0 to everything."""

    async def _make(self, prompt, weights, tally, kept):
        made = group(prompt, SAMPLES, weights.oldest)
        flat = tuple(type(one)(completion=one.completion, text=one.text, reward=0.0) for one in made.rollouts)
        return RolloutGroup(prompt=prompt, rollouts=flat)


@pytest.mark.slow
def test_a_reward_function_that_answers_0_to_everything_is_an_alarm_and_no_hang(tmp_path):
    thread = LoopThread("monitor")

    async def begin():
        return HealthMonitor(one.config, one.loop._journal, ask=None, series=RewardSeries())

    async def judge(report):
        return monitor.admit(report)

    def ask(report):
        decision = thread.call(judge(report))
        if not decision.admitted:
            one.loop.request_stop()  # as the Coordinator pauses it
        return decision

    one = trial(tmp_path, rollouts=Zeros(ahead=0, most_batches=MOST), ask=ask)
    one.config.gate.distance_float32 = one.config.gate.distance_bfloat16 = None  # the log-probs are made up
    monitor = thread.call(begin())
    before = one.weights()
    assert not one.run()
    thread.call(monitor.close())
    thread.close()
    (found,) = one.events("health.reward_collapse")
    assert "every reward was 0" in found["reason"]
    assert len(one.reports) == one.config.reward_health.zero_breaker_steps
    assert [len(r.prompt_ids) + len(r.filtered_ids) for r in one.reports[:3]] == [MOST * BATCH, MOST * BATCH, 4]
    assert all(r.metrics["grpo_actor/flat_groups/avg"] == 1 for r in one.reports)
    identical(one.weights(), before)
