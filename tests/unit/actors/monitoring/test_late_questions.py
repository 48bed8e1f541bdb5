"""A question of the gate that arrives late, or twice, counts once, and not for weights that the trainer left."""

from launcher.base.messages import Cause
from tests.support.worlds.borne_out import checked, fall, healthy, replayed
from tests.support.worlds.borne_out import world as world
from tests.support.worlds.health_monitor import batch, use

OF_BEFORE = {"mean_reward": 0.0, "high_reward": 0.0, "canaries": (), "replayed": replayed(0.5, 0.0), "lineage": 1}


def test_a_question_of_before_a_restore_is_no_evidence_against_what_was_restored(world):
    """It hung in a monitor that was stopped meanwhile. The collapsed weights' rewards contradicted the checkpoint, and
    the run was to end for a person."""

    def work(monitor):
        fall(monitor)
        monitor.restored(39, 45, 2)
        assert not monitor.admit(batch(40, **OF_BEFORE)).admitted
        assert (monitor.report().incident, monitor._series.next_step, monitor._series.owes_proof) == (None, 40, True)
        assert checked(monitor, 40, 0.5, again=replayed(0.5, 0.5)).admitted
        assert monitor.admit(batch(41, lineage=2)).admitted

    use(world, work)
    assert world.events("health.outside_weights") == []


def test_a_successor_knows_of_the_restore_and_those_of_another_attempt_are_not_counted(world):
    world.steps(40)
    world.journal.record("trainer.restored", subject="trainer", global_step=39, lineage=3)
    late = {"mean_reward": 0.5, "lineage": 2}
    assert not use(world, lambda monitor: monitor.admit(batch(40, **late))).admitted
    world.journal.attempt = 2
    assert use(world, lambda monitor: monitor.admit(batch(40, **late))).admitted


def test_a_restore_that_nobody_told_it_of_is_known_from_the_next_question(world):
    def work(monitor):
        healthy(monitor, 45)
        assert monitor.admit(batch(45, lineage=4)).admitted
        assert not monitor.admit(batch(45, lineage=3)).admitted
        assert monitor._series.next_step == 46

    use(world, work)


def test_the_same_question_after_another_one_counts_no_second_time(world):
    """Asked again as the answer was late, and delivered after the next one: two steps were taken back, and a server was
    doubted for what it had done before it was sent its weights anew."""

    def work(monitor):
        healthy(monitor, 45)
        first = monitor.admit(batch(45, question="a"))
        bad = monitor.admit(batch(46, question="b", weight_versions=(45,)))
        assert monitor.admit(batch(46, question="c")).admitted
        assert monitor.admit(batch(45, question="a")) == first
        assert monitor.admit(batch(46, question="b", weight_versions=(45,))) == bad
        assert (bad.admitted, bad.cause, monitor._series.next_step) == (False, Cause.SERVER_STALE, 47)
        assert monitor.admit(batch(47)).admitted, "without a name each one counts"
        assert monitor.admit(batch(48)).admitted, "without a name each one counts"
        assert monitor._series.next_step == 49

    use(world, work)
