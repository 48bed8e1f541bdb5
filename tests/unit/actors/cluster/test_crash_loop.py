"""A run whose supervisors die each time they are started ends in a word; one that is killed now and then does not."""

from actors.cluster.heartbeat import PATIENCE_S, SHORT_LIFE_S, CrashLoop


def live(lives_s, *, pause_s=0.5):
    """True at the first life after which the loop is given up, by its number."""
    now = 0.0
    lives = CrashLoop(lambda: now)
    for number, life_s in enumerate(lives_s):
        lives.begins()
        now += life_s
        if lives.ended():
            return number
        now += pause_s
    return None


def test_one_that_dies_each_time_is_given_up_when_patience_ends():
    given_up = live([2.0] * 1000)
    assert given_up is not None
    assert PATIENCE_S < (given_up + 1) * 2.5 < PATIENCE_S + 5


def test_one_that_works_between_its_deaths_never_is():
    assert live([SHORT_LIFE_S + 1] * 1000) is None


def test_a_life_that_lasted_makes_earlier_deaths_forgotten():
    some = [2.0] * 100
    assert live([*some, SHORT_LIFE_S + 1, *some, SHORT_LIFE_S + 1, *some]) is None
