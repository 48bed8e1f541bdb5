"""What follows the end of a driver: another one within budgets that any further step refills, or the run's end."""

import signal

import pytest

from launcher.base.exit_codes import AGAIN
from launcher.base.messages import Cause
from launcher.config.supervision import RestartConfig
from launcher.policy.next_attempt import Again, BeginAgain, EndRun, KeptRun, after_end, begun

LOST, HALTED, KILLED = Cause.CLUSTER_LOST, Cause.RUN_HALTED, Cause.DRIVER_LOST
INT, TERM, NOTICE, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL
RAYLET = "Ray's own process raylet ended (by SIGKILL)"
REASONS = {LOST: RAYLET, HALTED: "trainer_crash of trainer again"}


class Command:
    """One command whose drivers end, on a clock that the test sets."""

    def __init__(self, **kept):
        restart = {name: kept.pop(name) for name in ("cluster", "driver", "attempt") if name in kept}
        self.run = KeptRun(restart=RestartConfig(**restart), **kept)
        self.now = 1000.0
        self.progress_at = None
        self.history = []

    def ends(self, how, *, asked=None):
        """`how`: a cause, or what the driver's process returned."""
        returned = {LOST: AGAIN, HALTED: AGAIN, KILLED: -KILL}.get(how, how)
        again = Again(cause=how, reason=REASONS[how], began=self.now - 1) if how in REASONS else None
        next_ = after_end(
            returned, again, self.history, self.run, now=self.now, progress_at=self.progress_at, asked=asked
        )
        if isinstance(next_, BeginAgain):
            self.history.append(begun(next_, self.now))
        return next_

    def waits(self, *causes):
        return [self.ends(cause).not_before - self.now for cause in causes]


@pytest.mark.parametrize(
    ("returned", "asked", "code", "reason"),
    [
        *((code, None, code, "") for code in (0, 1, 2, 3, 75, 130)),
        *((code, INT, code, "") for code in (0, 130)),
        (AGAIN, None, 3, "its driver asked for another attempt, and again.json does not say why"),
        *((-one, None, 130, f"ended by the user; the driver was ended by {one.name}") for one in (INT, TERM)),
        (-signal.SIGHUP, None, 130, "ended by the user; the driver was ended by SIGHUP"),
        (-NOTICE, None, 75, "the machine is taken away (SIGUSR1); the driver was ended by SIGUSR1"),
        (KILLED, TERM, 130, "ended by the user; the driver was ended by SIGKILL"),
        (KILLED, NOTICE, 75, "the machine is taken away (SIGUSR1); the driver was ended by SIGKILL"),
        *((cause, INT, 130, "ended by the user; before another attempt was begun") for cause in REASONS),
        (LOST, NOTICE, 75, "the machine is taken away (SIGUSR1); before another attempt was begun"),
    ],
)
def test_what_ends_the_run(returned, asked, code, reason):
    """An exit code is the driver's own word; who was asked to end is not begun again."""
    assert Command().ends(returned, asked=asked) == EndRun(code=code, reason=reason)


@pytest.mark.parametrize("number", [KILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_killed_driver_is_begun_again_at_once(number):
    next_ = Command().ends(-number)
    assert (next_.not_before, next_.began) == (1000.0, 1000.0)
    assert next_.reason == f"it was ended by {number.name}; once in this command"


def test_a_driver_that_a_signal_without_a_name_ended_is_begun_again():
    """It raised ValueError, and the keeper ended with a traceback and no status."""
    assert Command().ends(-40).reason == "it was ended by signal 40; once in this command"


@pytest.mark.parametrize(
    ("cause", "waits", "spent"),
    [
        (LOST, [0, 1, 2], f"{RAYLET}; 3 new clusters brought no further step (restart.cluster)"),
        (KILLED, [0, 1, 2], "the driver was ended by SIGKILL; 3 new drivers brought no further step (restart.driver)"),
        (
            HALTED,
            [30, 60, 120, 240, 480, 960],
            "trainer_crash of trainer again; 6 new attempts brought no further step (restart.attempt)",
        ),
    ],
)
def test_waits_double_and_the_budget_ends(cause, waits, spent):
    command = Command()
    assert command.waits(*[cause] * len(waits)) == waits
    assert command.ends(cause) == EndRun(code=3, reason=spent)


@pytest.mark.parametrize(("cause", "first"), [(LOST, 0.0), (KILLED, 0.0), (HALTED, 30.0)])
def test_a_further_step_refills_the_budget(cause, first):
    command = Command()
    for _ in range(12):
        command.now += 1
        command.progress_at = command.now
        assert command.waits(cause) == [first]
    assert command.waits(cause) != [first], "without one the budget is used"


def test_a_quiet_window_refills_it():
    command = Command()
    command.waits(LOST, LOST, LOST)
    command.now += command.run.restart.window_s + 1
    assert command.waits(LOST) == [0]


def test_each_cause_has_a_budget_of_its_own():
    command = Command()
    assert command.waits(HALTED, LOST, LOST, LOST, KILLED, HALTED) == [30, 0, 1, 2, 0, 60]


@pytest.mark.parametrize("cause", [LOST, HALTED, KILLED])
@pytest.mark.parametrize("kept", [{"cluster": 0, "attempt": 0, "driver": 0}, {"resumes": False}])
def test_where_none_may_follow_the_run_ends_as_it_did(cause, kept):
    reason = REASONS.get(cause, "the driver was ended by SIGKILL")
    off = "; recover.mode=off resumes nothing" if "resumes" in kept else ""
    assert Command(**kept).ends(cause) == EndRun(code=3, reason=f"{reason}{off}")


def test_what_a_killed_driver_started_on_a_joined_cluster_gets_the_time_of_a_lease():
    assert Command(least_wait_s=15.0).waits(KILLED, LOST) == [15, 0]


def test_the_incident_says_what_is_done_and_how_often():
    command = Command()
    first, second = command.ends(KILLED), command.ends(KILLED)
    assert (first.times, second.times) == (1, 2)
    assert second.reason == "it was ended by SIGKILL; 2 times in this command"
    assert second.doing == "a new driver has taken its place, and the run resumes from its newest state"
    lost, halted = command.ends(LOST), command.ends(HALTED)
    assert (lost.reason, lost.began) == (RAYLET, 999.0)
    assert lost.doing == "a new cluster is started, and the run resumes from its newest state"
    assert halted.doing == "a new attempt (1 of 6) begins in 30 s, and resumes from the run's newest state"
