"""What takes the place of a cluster that was lost, or of an attempt that halted, within budgets that any further step
refills; and its incident."""

import time

import pytest

from actors.cluster.cluster_restarts import AttemptLost, ClusterRestarts, last_committed
from launcher.base.errors import RunError
from launcher.base.messages import KilledDriver, RunOutcome, TerminalStatus
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.run_files.journal import Journal, append_line, read_lines
from launcher.run_files.run_paths import RunPaths

HALTED = RunOutcome(status=TerminalStatus.ERRORED, reason="trainer_crash of trainer again", may_pass=True)
LOST = "Ray's own process raylet ended (by SIGKILL), and with it all that it ran"


class World:
    """One command whose clusters are lost, each time in a new process, on a clock that the test sets."""

    def __init__(self, folder, *, cluster=3, attempt=6, mode="auto", can_restart=True):
        self.config = RunConfig(experiment_name="lost", train_dataset=DatasetConfig(path="none"))
        self.config.cluster.fileroot = str(folder)
        self.config.restart.cluster, self.config.recover.mode = cluster, mode
        self.config.restart.attempt = attempt
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        self.can_restart, self.now, self.attempt = can_restart, 1000.0, 0
        self.begin_process(None)

    def begin_process(self, known):
        self.attempt += 1
        self.journal = Journal(self.paths.events, self.attempt, time.time)
        count = (lambda: self.attempt + 1) if self.can_restart else None
        self.restarts = ClusterRestarts(self.config, known=known, next_attempt=count, clock=lambda: self.now)
        self.restarts.record_restart(self.journal, self.paths)

    def lose(self) -> AttemptLost:
        lost = self.restarts.begin(LOST, self.journal, self.paths)
        self.begin_process(lost.known)
        return lost

    def step(self, number) -> None:
        append_line(self.paths.ledger, {"global_step": number, "attempt": self.attempt})
        self.restarts.reached(number + 1)

    def halt(self, outcome=HALTED) -> AttemptLost | RunOutcome:
        next_ = self.restarts.begin_anew(outcome, self.journal, self.paths)
        if isinstance(next_, AttemptLost):
            self.begin_process(next_.known)
        return next_

    def events(self, name):
        return [event for event in read_lines(self.paths.events) if event["event"] == name]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_the_first_is_begun_at_once_and_the_next_after_waits_that_double(world):
    waits = []
    for _ in range(3):
        waits.append(world.lose().not_before - world.now)
        world.now += 100
    assert waits[0] == 0
    assert [world.config.restart.wait_initial_s * 2**n for n in (0, 1)] == [1.0, 2.0]
    world.now -= 100  # at once after the third
    with pytest.raises(RunError, match=r"ended \(by SIGKILL\).*; 3 new clusters brought no further step"):
        world.lose()


def test_a_loss_right_after_the_last_one_waits(world):
    world.lose()
    assert world.lose().not_before == world.now + world.config.restart.wait_initial_s
    assert world.lose().not_before == world.now + 2 * world.config.restart.wait_initial_s


def test_a_step_further_than_ever_refills_the_budget_and_a_repeated_one_does_not(world):
    for step in range(1, 12):
        world.now += 1
        world.restarts.reached(step)
        world.now += 1
        world.lose()
    for _ in range(2):
        world.restarts.reached(11)
        world.lose()
    with pytest.raises(RunError, match="3 new clusters"):
        world.lose()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"cluster": 0}, LOST),
        ({"can_restart": False}, LOST),
        ({"mode": "off"}, "recover.mode=off resumes nothing"),
    ],
)
def test_where_none_may_be_begun_the_run_ends_as_it_did(tmp_path, kind, says):
    world = World(tmp_path, **kind)
    with pytest.raises(RunError) as ended:
        world.lose()
    assert ended.value.message == LOST
    assert says in str(ended.value)
    assert ended.value.exit_code == 3
    assert world.events("incident.began") == []


def test_the_incident_is_the_next_one_and_belongs_to_the_attempt_that_follows(world):
    world.journal.record("incident.began", incident=6)
    append_line(world.paths.ledger, {"global_step": 41})
    lost = world.lose()
    began = world.events("incident.began")[-1]
    assert (began["incident"], began["attempt"], began["cause"], began["subject"]) == (7, 2, "cluster_lost", "cluster")
    assert began["reason"] == LOST
    assert (lost.known.incident, lost.known.attempt) == (7, 2)
    (restarted,) = world.events("cluster.restarted")
    assert (restarted["incident"], restarted["attempt"], restarted["global_step"]) == (7, 2, 41)


@pytest.mark.parametrize(("times", "often"), [(1, "once in this command"), (3, "3 times in this command")])
def test_a_driver_that_was_killed_is_one_incident_that_says_how_often(world, times, often):
    append_line(world.paths.ledger, {"global_step": 41})
    killed = KilledDriver(how="SIGKILL", at=990.0, began=1.0, times=times, mark="GRPO_KEPT=nobody bears it")
    restarts = ClusterRestarts(world.config, killed=killed, clock=lambda: world.now)
    restarts.end_what_was_left()
    restarts.record_restart(world.journal, world.paths)
    (began,), (restarted,) = world.events("incident.began"), world.events("driver.restarted")
    assert (began["incident"], began["cause"], began["subject"]) == (1, "driver_lost", "driver")
    assert began["reason"] == f"it was ended by SIGKILL; {often}"
    assert (restarted["incident"], restarted["global_step"], restarted["times"]) == (1, 41, times)
    assert restarted["seconds"] == 10.0


def test_of_the_ledger_the_last_line_counts(world):
    assert last_committed(world.paths) is None
    for step in (7, 8, 3):
        append_line(world.paths.ledger, {"global_step": step})
    assert last_committed(world.paths) == 3


# ── an attempt that halted ──


def test_an_attempt_that_halted_is_begun_anew_after_waits_that_double_and_at_last_the_run_has_its_reason(world):
    world.step(0)
    waits = []
    for _ in range(world.config.restart.attempt):
        world.now += 10
        waits.append(world.halt().not_before - world.now)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0]
    last = world.halt()
    assert last.reason == f"{HALTED.reason}; 6 new attempts brought no further step (restart.attempt)"
    assert last.status is TerminalStatus.ERRORED


def test_a_step_further_than_ever_refills_it_and_one_taken_again_does_not(world):
    for number in range(20):
        world.now += 1
        world.step(number)
        world.now += 1
        assert world.halt().not_before == world.now + 30.0
    for wait_s in (60.0, 120.0):
        world.step(19)
        assert world.halt().not_before == world.now + wait_s


def test_a_lost_cluster_and_a_halt_have_budgets_of_their_own(world):
    world.step(0)
    world.halt()
    for _ in range(3):
        world.lose()
    assert world.halt().not_before == world.now + 60.0


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ({"attempt": 0}, HALTED),
        ({"can_restart": False}, HALTED),
        ({"mode": "off"}, HALTED),
        ({}, RunOutcome(status=TerminalStatus.ERRORED, reason="trainer_oom of trainer again")),
    ],
)
def test_where_none_may_follow_the_halt_stays(tmp_path, kind, outcome):
    world = World(tmp_path, **kind)
    world.step(0)
    assert world.halt(outcome) == outcome
    assert world.events("incident.began") == []


def test_what_has_never_taken_a_step_under_this_command_is_not_begun_anew(world):
    """Its settings may never work. The steps of an earlier command show nothing of this one's."""
    assert world.halt() == HALTED
    append_line(world.paths.ledger, {"global_step": 40, "attempt": world.attempt - 1})
    assert world.halt() == HALTED
    world.step(41)
    assert isinstance(world.halt(), AttemptLost)
    assert isinstance(world.halt(), AttemptLost), "the step of the attempt before is one of this command"


def test_the_incident_of_a_halt_says_what_follows_and_when(world):
    world.step(41)
    world.halt()
    (began,), (anew,) = world.events("incident.began"), world.events("attempt.begun_anew")
    assert (began["cause"], began["subject"], began["reason"]) == ("run_halted", "run", HALTED.reason)
    assert began["doing"] == "a new attempt (1 of 6) begins in 30 s, and resumes from the run's newest state"
    assert (anew["incident"], anew["attempt"], anew["global_step"]) == (began["incident"], 2, 41)
    assert world.events("cluster.restarted") == []
