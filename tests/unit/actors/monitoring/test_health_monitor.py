"""The monitor without Ray: it reads the run's own files, asks servers' actors, and answers at the gate."""

import asyncio
import dataclasses
import threading

import pytest

from launcher.base.messages import Cause, Health, Verdict
from launcher.policy.canary_policy import SILENT_ROUNDS, CanaryRound
from launcher.run_files import journal
from launcher.run_files.journal import Journal, read_lines
from tests.support.worlds.health_monitor import SERVES, SOUND, WRONG, Server, batch, use, watched
from tests.support.worlds.health_monitor import world as world
from tests.support.worlds.server_watch import deadline_s

# ── the gate ──


def test_a_sound_run_is_admitted_step_by_step(world):
    def work(monitor):
        for step in range(40):
            assert monitor.admit(batch(step)).admitted
        return monitor.report()

    view = use(world, work)
    assert view.incident is None
    assert list(read_lines(world.paths.events)) == []  # silence is the sound of health


@pytest.mark.parametrize("mean_reward", [0.4, 0.0])  # the second alone would look like a collapse
def test_s1_not_one_batch_passes_a_broken_verifier_and_it_is_named_at_once(world, mean_reward):
    world.steps(30)
    world.config.gate.max_reward_jump = 0.2

    def work(monitor):
        answers = [monitor.admit(batch(30, canaries=(SOUND, WRONG), mean_reward=mean_reward)) for _ in range(3)]
        return answers, monitor.report()

    answers, view = use(world, work)
    assert not any(answer.admitted for answer in answers)
    assert {(answer.cause, answer.subjects) for answer in answers} == {(Cause.VERIFIER_BROKEN, ("reward",))}
    assert (view.incident.cause, view.incident.onset_step) == (Cause.VERIFIER_BROKEN, 30)
    assert len(world.events("health.verifier_broken")) == len(world.events("canary.wrong")) == 1


def test_a_verifier_that_was_mended_is_believed_after_sound_rounds(world):
    world.steps(30)

    def work(monitor):
        assert not monitor.admit(batch(30, canaries=(WRONG,))).admitted
        answers = []
        for _ in range(world.config.reward_health.canary_clear_rounds):
            monitor.canaries(CanaryRound(step=30, scores=(SOUND,)))
            answers.append(monitor.report().incident is None)
        return answers, monitor.admit(batch(30)).admitted

    assert use(world, work) == ([False] * 4 + [True], True)
    assert len(world.events("health.mended")) == len(world.events("canary.sound")) == 1


def test_a_collapse_stops_the_steps_until_the_trainer_is_restored(world):
    world.steps(60)
    for step in range(60, 66):
        world.step(step, reward=0.0, high=0.0)

    def work(monitor):
        refused = monitor.admit(batch(66, mean_reward=0.0))
        incident = monitor.report().incident
        monitor.restored(55, incident.onset_step)
        return refused, incident, monitor.report().incident, monitor.admit(batch(56))

    refused, incident, after, again = use(world, work)
    assert not refused.admitted
    assert incident.cause is Cause.REWARD_COLLAPSE
    assert abs(incident.onset_step - 60) <= 2
    assert after is None  # as soon as the trainer is restored, before a step is repeated
    assert again.admitted


def test_a_collapse_is_found_in_the_batches_that_were_admitted(world):
    def work(monitor):
        answers = [monitor.admit(batch(step)).admitted for step in range(60)]
        for step in range(60, 80):
            answers.append(monitor.admit(batch(step, mean_reward=0.0, high_reward=0.0)).admitted)
        return answers, monitor.report().incident

    world.config.gate.max_reward_jump = None
    answers, incident = use(world, work)
    assert all(answers[:60])
    assert 60 < answers.index(False) < 70
    assert not any(answers[answers.index(False) :])
    assert (incident.cause, incident.subject) == (Cause.REWARD_COLLAPSE, "policy")
    assert len(world.events("health.reward_collapse")) == 1


def test_zeros_are_alerted_once_before_they_stop_the_run(world):
    """The level had no reader: a run of zeros was first heard of when it was stopped."""
    world.config.reward_health.fall_threshold = None

    def work(monitor):
        for step in range(7):
            monitor.admit(batch(step, mean_reward=0.0, high_reward=0.0))
        monitor.admit(batch(7))

    use(world, work)
    (alert,) = world.events("reward.alert")
    assert (alert["reason"], alert["global_step"]) == ("every reward was 0 for 5 steps in a row", 0)
    assert len(world.events("reward.alert_over")) == 1


def test_zeros_from_the_first_step_on_and_no_known_answer_say_that_nothing_was_ever_rewarded(world):
    def work(monitor):
        for step in range(6):
            monitor.admit(batch(step, mean_reward=0.0, high_reward=0.0, canaries=()))

    use(world, work)
    (alert,) = world.events("reward.alert")
    said = "every reward was 0 for 5 steps in a row, and reward.fn was never seen to reward anything in this run"
    assert alert["reason"] == said


@pytest.mark.parametrize("zeros", [10, 14])
def test_zeros_that_reach_the_breaker_have_become_worse_and_are_not_over(world, zeros):
    world.config.reward_health.fall_threshold = None

    def work(monitor):
        for step in range(zeros):
            monitor.admit(batch(step, mean_reward=0.0, high_reward=0.0))

    use(world, work)
    assert len(world.events("reward.alert")) == len(world.events("health.reward_collapse")) == 1
    assert not world.events("reward.alert_over")


def test_zeros_that_a_restore_has_undone_are_over_when_other_rewards_come(world):
    world.config.reward_health.fall_threshold = None

    def work(monitor):
        monitor.admit(batch(0))
        for step in range(1, 7):
            monitor.admit(batch(step, mean_reward=0.0, high_reward=0.0))
        assert len(world.events("reward.alert")) == 1
        monitor.restored(0)
        assert not world.events("reward.alert_over"), "nothing was seen since"
        for step in range(1, 8):
            monitor.admit(batch(step))

    use(world, work)
    assert len(world.events("reward.alert_over")) == 1


def test_a_round_in_which_nothing_was_scored_acquits_nobody(world):
    world.config.reward_health.canary_clear_rounds = 1
    missing = dataclasses.replace(SOUND, got=None)

    def work(monitor):
        for _ in range(SILENT_ROUNDS):
            monitor.canaries(CanaryRound(step=0, scores=(missing,)))
        assert len(world.events("canary.wrong")) == 1
        monitor.canaries(CanaryRound(step=0, scores=()))
        assert not world.events("canary.sound")
        monitor.canaries(CanaryRound(step=0, scores=(SOUND,)))

    use(world, work)
    assert len(world.events("canary.sound")) == 1


def test_a_batch_for_an_earlier_step_takes_back_the_later_ones_though_no_event_says_so(world):
    world.steps(60)
    for step in range(60, 66):
        world.step(step, reward=0.0, high=0.0)
    assert use(world, lambda monitor: monitor.admit(batch(50))).admitted


def test_a_changed_reward_is_turned_away_twice_and_then_left_to_the_detectors(world):
    world.steps(30)

    def work(monitor):
        decisions = [monitor.admit(batch(30, mean_reward=1.0, canaries=())) for _ in range(3)]
        assert {one.cause for one in decisions[:2]} == {Cause.REWARD_COLLAPSE}
        return [one.admitted for one in decisions]

    world.config.gate.max_reward_jump = 0.4
    assert use(world, work) == [False, False, True]


def test_rewards_that_fell_are_reported_until_a_collapse_would_have_been_found(world):
    """The incident of the rejected batches was told as repaired, and the collapse that they began as a second one."""
    world.steps(30)
    world.config.gate.max_reward_jump = 0.4

    def work(monitor, mean):
        seen = [monitor.report()]
        for step in (30, 30, 30, 31, 32, 33, 34):
            monitor.admit(batch(step, mean_reward=mean, canaries=()))
            seen.append(monitor.report())
        monitor.restored(25)
        levels = [level and (level.since_step, level.is_settled) for level in (one.lower_level for one in seen)]
        return levels, seen[-1].incident and seen[-1].incident.cause, monitor.report().lower_level

    fell, settled = (30, False), (30, True)
    collapsed = [None, None, None, fell, fell, fell, fell, fell]
    assert use(world, lambda m: work(m, 0.05)) == (collapsed, Cause.REWARD_COLLAPSE, None)
    assert use(world, lambda m: work(m, 1.0)) == ([None] * 8, None, None), "what rose may stay"
    world.config.reward_health.fall_threshold = None
    assert use(world, lambda m: work(m, 0.05)) == ([*collapsed[:-1], settled], None, None)


def test_a_batch_that_is_asked_about_again_is_judged_once(world):
    """A monitor that was stopped for 25 s finds the same question three times: the third answer let the batch pass."""
    world.steps(30)
    silent = dataclasses.replace(SOUND, got=None, error="took too long")

    def work(monitor):
        jump = batch(30, mean_reward=1.0, question="the first batch")
        jumped = {monitor.admit(jump).admitted for _ in range(4)}
        unscored = batch(30, canaries=(silent,), question="the second one")
        for _ in range(SILENT_ROUNDS):
            monitor.admit(unscored)
        unjudged = monitor.report().incident
        monitor.admit(dataclasses.replace(unscored, question="the third one"))
        return jumped, unjudged, monitor.report().incident.cause

    world.config.gate.max_reward_jump = 0.4
    assert use(world, work) == ({False}, None, Cause.VERIFIER_BROKEN)


def test_what_is_usual_begins_anew_with_a_change_that_stayed(world):
    """Else each step after it cost three batches, until the median of the last twenty was the new level."""
    world.steps(30)

    def work(monitor):
        asked = []
        for step in range(30, 40):
            asked.append(1)
            while not monitor.admit(batch(step, mean_reward=1.0, canaries=())).admitted:
                asked[-1] += 1
        assert not monitor.admit(batch(40, mean_reward=0.5, canaries=())).admitted, "as far from the new level"
        monitor.restored(25)
        assert not monitor.admit(batch(26, mean_reward=1.0, canaries=())).admitted, "the level of before is back"
        return asked

    world.config.gate.max_reward_jump = 0.4
    assert use(world, work) == [3, *[1] * 9]


def test_a_batch_as_usual_after_some_that_were_not_is_no_change(world):
    """The five batches after it were compared with nothing: of a failure that comes and goes they were trained on."""
    world.steps(30)

    def work(monitor):
        offered = [(30, 0.0), (30, 0.0), (30, 0.5), (31, 0.0)]
        return [monitor.admit(batch(step, mean_reward=mean, canaries=())).admitted for step, mean in offered]

    world.config.gate.max_reward_jump = 0.4
    assert use(world, work) == [False, False, True, False]


def test_a_policy_that_does_not_end_any_more_accuses_no_server(world):
    """Its log-probs are the trainer's: to send the weights again, as for damaged ones, changes nothing."""
    world.steps(30)
    world.servers["server-0"] = Server()

    async def work(monitor):
        await watched(monitor)
        answer = monitor.admit(batch(30, truncated=128))
        return answer, monitor.report().servers["server-0"].verdict

    answer, verdict = use(world, work)
    assert (answer.admitted, answer.is_compared, answer.cause) == (False, True, Cause.REWARD_COLLAPSE)
    assert verdict == SERVES


def test_tokens_of_another_model_make_the_servers_doubtful_until_they_are_probed(world):
    world.steps(30)
    world.servers["server-0"] = Server()

    async def work(monitor):
        await watched(monitor)
        answer = monitor.admit(batch(30, logprob_distance=8.5e-4))
        doubted = monitor.report().servers["server-0"].verdict
        monitor.trust("server-0")
        return answer, doubted, monitor.report().servers["server-0"].verdict

    answer, doubted, after = use(world, work)
    assert (answer.admitted, answer.cause) == (False, Cause.SERVER_STALE)
    assert doubted == Verdict(health=Health.SUSPECT, reason=answer.reason, cause=Cause.SERVER_STALE)
    assert after == SERVES


def test_an_admitted_batch_clears_only_the_servers_whose_tokens_are_in_it(world):
    """A server's doubt had vanished with any admitted batch, before anybody could look at it."""
    world.servers = {"server-0": Server(), "server-1": Server()}

    async def work(monitor):
        await watched(monitor, "server-0", "server-1")
        monitor.admit(batch(30, weight_versions=(29,)))  # whose they were isn't known
        monitor.admit(batch(30, distances={"server-1": 1e-7}))
        return {name: seen.verdict.health for name, seen in monitor.report().servers.items()}

    world.steps(30)
    assert use(world, work) == {"server-0": Health.SUSPECT, "server-1": Health.HEALTHY}


def test_it_answers_while_the_disk_stalls(world, monkeypatch):
    """A stalled disk held the loop that answers the pings, and the monitor was ended for hanging."""
    free, append = threading.Event(), journal.append_line
    monkeypatch.setattr(journal, "append_line", lambda *line, **more: free.wait(deadline_s()) and append(*line, **more))
    world.journal = Journal(world.paths.events, attempt=1, in_background=True)
    answer = use(world, lambda monitor: monitor.admit(batch(30, canaries=(WRONG,))))
    assert answer.cause is Cause.VERIFIER_BROKEN
    assert world.events("canary.wrong") == []
    free.set()
    asyncio.run(world.journal.flush())
    assert len(world.events("canary.wrong")) == 1
