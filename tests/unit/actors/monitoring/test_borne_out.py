"""The monitor asks the run's own record before it believes a fall, and before the first step after a restore."""

from launcher.base.messages import Cause
from launcher.policy.canary_policy import CanaryRound, CanaryScore, compare_rescored
from tests.support.worlds.borne_out import KNOWN, SOUND, checked, fall, healthy, offered, replayed
from tests.support.worlds.borne_out import world as world
from tests.support.worlds.health_monitor import batch, use

BROKEN = compare_rescored(KNOWN, [0.0] * 24)


def test_the_first_batch_of_a_broken_function_is_not_trained_on_and_the_run_continues_when_it_is_repaired(world):
    def work(monitor):
        healthy(monitor, 45)
        asked = offered(monitor, 45, 0.0)
        assert (asked.admitted, asked.check_before, asked.cause) == (False, 45, None)
        assert not checked(monitor, 45, 0.0, BROKEN).admitted
        incident = monitor.report().incident
        assert (incident.cause, incident.subject, incident.onset_step) == (Cause.VERIFIER_BROKEN, "reward", 45)
        assert incident.reason == "24 completions of healthy steps were scored 0, not 1"
        for _ in range(5):
            monitor.canaries(CanaryRound(step=45, scores=(SOUND,)))
        assert monitor.report().incident is None
        assert offered(monitor, 45, 0.5).admitted

    use(world, work)


def test_a_low_batch_that_is_rejected_for_what_it_is_is_not_asked_about(world):
    unscored = CanaryScore(name="right answer of 7", expected=1.0, got=None, error="it raised")

    def work(monitor):
        healthy(monitor, 45)
        report = batch(45, mean_reward=0.0, high_reward=0.0, canaries=(unscored,), can_check=True)
        decision = monitor.admit(report)
        assert (decision.check_before, decision.cause) == (None, Cause.VERIFIER_BROKEN)
        assert "1 known answer without a reward" in decision.reason
        stale = offered(monitor, 45, 0.0, weight_versions=(44,))
        assert (stale.check_before, stale.cause) == (None, Cause.SERVER_STALE)

    use(world, work)


def test_a_fall_that_old_prompts_do_not_show_is_of_the_new_prompts_and_training_continues(world):
    def work(monitor):
        healthy(monitor, 45)
        for step in range(45, 60):
            decision = offered(monitor, step, 0.2)
            if decision.check_before is not None:
                decision = checked(monitor, step, 0.2, again=replayed(0.5, 0.5))
            assert decision.admitted
        assert monitor.report().incident is None

    use(world, work)
    (event,) = world.events("reward.rebased")
    assert event["global_step"] == 45
    assert "new ones are harder" in event["reason"]


def test_prompts_of_weaker_weights_do_not_vouch_for_a_policy_that_fell_back_to_what_it_was(world):
    def work(monitor):
        for step in range(60):
            assert offered(monitor, step, 0.1 + 0.01 * step + 0.02 * (-1) ** step).admitted
        step = 60
        while monitor.report().incident is None:
            decision = offered(monitor, step, 0.3)
            if decision.check_before is not None:
                checked(monitor, step, 0.3, again=replayed(0.3, 0.3, steps=range(32)))
            step += 1
        assert monitor.report().incident.cause is Cause.REWARD_COLLAPSE

    use(world, work)
    assert world.events("reward.rebased") == []


def test_on_probation_too_no_fall_is_believed_that_was_not_asked_about(world):
    def work(monitor):
        collapse(monitor)
        assert checked(monitor, 40, 0.54, again=replayed(0.5, 0.5)).admitted
        healthy(monitor, 9, first=41)
        for step in range(50, 80):
            decision = offered(monitor, step, 0.37 + 0.04 * (-1) ** step)
            if decision.check_before is not None:
                assert decision.check_before == 49, "whose mean of 0.46 the line takes for half of the way down to 0.37"
                return
            assert monitor.report().incident is None, "believed, and not asked about"
        raise AssertionError("never asked")

    use(world, work)


def collapse(monitor):
    fall(monitor)
    monitor.restored(39, onset_step=45)
    assert monitor.report().incident is None


def test_rewards_after_a_restore_that_contradict_the_checkpoint_clear_the_weights(world):
    def work(monitor):
        collapse(monitor)
        assert offered(monitor, 40, 0.0).check_before == 40, "before its first step"
        assert not checked(monitor, 40, 0.0, again=replayed(0.5, 0.0)).admitted
        incident = monitor.report().incident
        assert (incident.cause, incident.subject, incident.onset_step) == (
            Cause.OUTSIDE_WEIGHTS,
            "environment",
            None,
        )
        assert "step 39 earn 0 now, and earned 0.5 when they were saved" in incident.reason

    use(world, work)
    assert len(world.events("health.outside_weights")) == 1


def test_a_restore_that_nobody_told_it_of_is_checked_all_the_same(world):
    """The Coordinator was killed between the trainer's answer and the monitor's: the run went on unchecked, at the
    usual thresholds."""

    def work(monitor):
        fall(monitor)
        assert offered(monitor, 40, 0.0).check_before == 40, "before its first step"
        checked(monitor, 40, 0.0, again=replayed(0.5, 0.0))
        assert monitor.report().incident.cause is Cause.OUTSIDE_WEIGHTS

    use(world, work)


def test_a_crash_after_a_fall_that_went_back_to_after_its_onset_is_no_restore_from_it(world):
    def work(monitor):
        fall(monitor)
        last = monitor._series.next_step - 1
        assert offered(monitor, last, 0.0).check_before != last
        assert monitor._series.restored_step is None

    use(world, work)


def test_a_restore_that_is_borne_out_continues_and_owes_nothing_more(world):
    def work(monitor):
        collapse(monitor)
        assert offered(monitor, 40, 0.5).check_before == 40
        assert checked(monitor, 40, 0.5, again=replayed(0.5, 0.5)).admitted
        assert offered(monitor, 41, 0.5).admitted

    use(world, work)


def test_the_next_attempt_asks_before_its_first_step(world):
    world.steps(45)
    world.journal.record("health.outside_weights", subject="environment", reason="contradicted")
    use(world, lambda monitor: asserts_check(monitor, 45))
    world.step(45)
    use(world, lambda monitor: asserts_admitted(monitor, 46))


def asserts_check(monitor, step):
    assert offered(monitor, step, 0.5).check_before == step


def asserts_admitted(monitor, step):
    assert offered(monitor, step, 0.5).admitted
