"""The step loop with batches made ahead: they are in the state, so a resume is exact; and none outlives a rejection."""

from dataclasses import replace

import pytest

from launcher.base.errors import RewardError
from launcher.base.messages import Cause
from launcher.policy.admission import Admission
from tests.support.replay import prompts
from tests.support.worlds.training import AHEAD, BATCH, N_PROMPTS, SAMPLES, AheadReplay, Trial, identical


def trial(root, *, ahead=AHEAD, **settings):
    rollouts = AheadReplay(ahead=ahead)
    made = Trial(root, rollouts=rollouts, recipe={"use_decoupled_loss": True}, **settings)
    made.rollouts = rollouts
    made.config.rollout.max_head_offpolicyness = ahead
    made.loop._gate._rules = type(made.loop._gate._rules).of(made.config)
    return made


@pytest.mark.slow
def test_eight_steps_a_resume_and_four_more_are_twelve_with_batches_ahead(tmp_path):
    whole = trial(tmp_path / "whole", steps=12)
    assert whole.run()
    versions = [report.weight_versions for report in whole.reports]
    assert max(step - min(of) for step, of in enumerate(versions)) == AHEAD
    assert all(step - AHEAD <= min(of) and max(of) <= step for step, of in enumerate(versions))

    first = trial(tmp_path / "parts", steps=8)
    assert first.run()
    second = trial(tmp_path / "parts", steps=12, resume=True)
    assert second.queue._kept, "the state holds what was made ahead"
    assert second.run()
    reports = first.reports + second.reports
    assert [r.prompt_ids for r in reports] == [r.prompt_ids for r in whole.reports]
    assert [r.weight_versions for r in reports] == versions
    identical(second.weights(), whole.weights())
    identical(second.training_state(), whole.training_state())


@pytest.mark.slow
def test_of_a_rejected_batch_s_time_nothing_that_was_made_ahead_is_used(tmp_path):
    asked = []

    def ask(report):
        asked.append(report.weight_versions)
        return Admission(admitted=len(asked) != 3, reason="the monitor says no")

    one = trial(tmp_path, steps=5, ask=ask)
    assert one.run()
    assert asked[2] == (0,), "made two steps ahead"
    assert asked[3] == (2,), "made anew, at the weights of the rejection"
    assert sorted(i for r in one.reports for i in r.prompt_ids) == sorted(prompts(N_PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, AHEAD])
@pytest.mark.parametrize(
    ("cause", "is_kept"), [(Cause.VERIFIER_BROKEN, True), (Cause.REWARD_COLLAPSE, False), (Cause.SERVER_STALE, False)]
)
def test_after_a_pause_a_batch_with_spoilt_rewards_is_scored_and_not_generated_again(tmp_path, ahead, cause, is_kept):
    """One that was far from what is usual, cut short perhaps by a server that has been repaired since, is not: it would
    count once more, and with COMPARED_REJECTIONS used up be trained on."""
    asked, spoilt = [], []

    def ask(report):
        asked.append(report)
        if len(asked) == 3:
            spoilt.extend(one.queue.in_flight[:BATCH])
            one.loop.request_stop()
        return Admission(admitted=len(asked) != 3, reason="0 for all", cause=cause)

    one = trial(tmp_path, steps=4, ask=ask, ahead=ahead)
    assert not one.run()
    assert [report.global_step for report in one.reports] == [0, 1]
    before = one.rollouts.generated
    one.loop.allow()
    one.loop._config.total_train_steps = 3
    assert one.run()
    assert (list(one.reports[2].prompt_ids) == spoilt) is is_kept
    taken = min((ahead + 1) * BATCH, N_PROMPTS - 2 * BATCH)
    assert one.rollouts.generated - before == taken - (BATCH if is_kept else 0)
    one.loop._config.total_train_steps = 5
    one.loop.allow()
    assert one.run()
    assert sorted(i for r in one.reports for i in r.prompt_ids) == sorted(prompts(N_PROMPTS))


@pytest.mark.slow
def test_a_batch_whose_scores_stay_broken_is_generated_anew_in_the_end(tmp_path):
    """Scored again after each pause, it is first in the queue, but only the last one is, and never without a pause."""
    asked = []

    def ask(report):
        asked.append(report)
        if len(asked) in (3, 5):
            one.loop.request_stop()
        return Admission(admitted=len(asked) not in (3, 4, 5), reason="0 for all", cause=Cause.VERIFIER_BROKEN)

    one = trial(tmp_path, steps=4, ask=ask, ahead=0)
    assert not one.run()
    assert one.rollouts.generated == 3 * BATCH
    one.loop.allow()
    assert not one.run()
    assert one.rollouts.generated == 4 * BATCH, "once what was kept, then another batch"
    one.loop.allow()
    assert one.run()
    assert one.rollouts.generated == 5 * BATCH
    assert len({i for r in one.reports for i in r.prompt_ids}) == 4 * BATCH


@pytest.mark.slow
def test_completions_that_a_sound_function_scores_beyond_all_numbers_are_generated_anew(tmp_path):
    """Scored again they are the same each time: the run stood still for as long as a broken function is waited for."""
    one = trial(tmp_path, steps=1, ask=lambda report: Admission(admitted=True, reason=""), ahead=0)
    make, first = one.rollouts._make, set(prompts(N_PROMPTS))

    async def huge(prompt, weights, tally, kept):
        made = await make(prompt, weights, tally, kept)
        if not kept and prompt.id not in first:
            return made
        first.discard(prompt.id)
        rewards = ((1.0 + n / 100) * 1e308 for n in range(SAMPLES))
        scored = (replace(each, reward=reward) for each, reward in zip(made.rollouts, rewards, strict=True))
        return replace(made, rollouts=tuple(scored))

    one.rollouts._make = huge
    with pytest.raises(RewardError, match="no finite advantages"):
        one.run()
    first.clear()
    one.loop.allow()
    assert one.run()
