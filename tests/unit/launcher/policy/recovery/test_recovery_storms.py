"""Faults in any order, at any moment, also during repairs: no illegal transition, and every run ends in a word."""

import random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from launcher.base.messages import Cause
from launcher.policy.actions import RestartServer, RestartTrainer, RestoreTrainer
from launcher.policy.checkpoint_status import CheckpointStatus, JudgedCheckpoint
from launcher.policy.exit_cause import RanOut
from launcher.policy.plan_builder import PlanBuilder
from launcher.policy.run_state import ENDS, RunState
from tests.support.simulated_run.recovery_parts import CONFIG, TOTAL_STEPS
from tests.support.simulated_run.recovery_world import World

LONG_ENOUGH_S = 600
NAMES = ("s0", "s1")


def begun(**kwargs):
    world = World(**kwargs)
    world.begin()
    return world


def orders(world, kind):
    return [action for made in world.plans for action in made.actions if isinstance(action, kind)]


def test_without_faults_every_step_is_made_once():
    world = begun()
    assert world.run(LONG_ENOUGH_S) is RunState.FINISHED
    assert world.trained == list(range(TOTAL_STEPS))
    assert not orders(world, RestartServer)
    assert not orders(world, RestartTrainer)
    assert [action.global_step for action in orders(world, RestoreTrainer)] == [-1]


def faults_of_a_storm(world, rng):
    """The storm of the default experiment, in an order of its own."""

    def a_server(cause):
        return lambda: world.crash_server(rng.choice(NAMES), cause)

    storm = [
        *[a_server(Cause.SERVER_CRASH)] * 3,  # C1
        *[a_server(Cause.SERVER_HANG)] * 2,  # C2
        lambda: [world.crash_server(name, Cause.SERVER_CRASH) for name in NAMES],  # C7
        lambda: world.drop_load("s0"),  # C5
        lambda: world.sleep_through_a_restore("s1"),
        lambda: world.corrupt("s1"),  # C6
        *[lambda: world.crash_trainer(Cause.TRAINER_CRASH)] * 2,  # T1
        lambda: setattr(world.trainer, "is_damaged", True),  # S4
        lambda: setattr(world, "verifier_broke_at", (world.now, world.trainer.next_step)),  # S1
        world.tear_newest_checkpoint,  # T4
    ]
    return rng.sample(storm, len(storm))


def settle(world):
    """Until the run is running again, or for as long as a repair may take."""
    for _ in range(60):
        if world.state is RunState.RUNNING:
            break
        world.tick()
    return world.state


@pytest.mark.parametrize("seed", range(8))
def test_a_storm_of_passing_faults_ends_finished(seed):
    rng = random.Random(seed)
    world = begun()
    for fault in faults_of_a_storm(world, rng):
        world.run(rng.randrange(3, 9))
        assert settle(world) is RunState.RUNNING
        fault()
        if world.verifier_broke_at is not None:
            world.run(rng.randrange(1, 9))
            world.verifier_broke_at = None
    assert world.trainer.next_step < TOTAL_STEPS  # all of it fell into the run
    assert world.run(LONG_ENOUGH_S) is RunState.FINISHED
    assert set(world.trained) == set(range(TOTAL_STEPS))
    assert not world.trainer.is_damaged


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"servers_die_at_start": frozenset(NAMES)}, "server_crash of s"),
        ({"trainer_dies_at_step": 17}, "trainer_crash of trainer again"),
        ({"collapses_at_step": 20}, "reward_collapse at about step 21, 3 times"),
    ],
)
def test_a_fault_that_no_repair_removes_ends_in_errored_with_its_reason(faults, reason):
    world = begun(**faults)
    if world.servers_die_at_start:
        world.run(5)
        for name in NAMES:
            world.crash_server(name, Cause.SERVER_CRASH)
    assert world.run(LONG_ENOUGH_S) is RunState.ERRORED
    assert reason in "; ".join(made.reason for made in world.plans)


def test_a_verifier_that_stays_broken_ends_in_errored_within_its_patience():
    world = begun()
    world.run(20)
    steps = world.trainer.next_step
    world.verifier_broke_at = (world.now, steps)
    assert world.run(int(CONFIG.reward_health.verifier_patience_s) + 10) is RunState.ERRORED
    assert world.trainer.next_step == steps


def test_one_server_that_is_beyond_repair_is_given_up_and_the_run_finishes():
    world = begun(servers_die_at_start=frozenset({"s1"}))
    world.run(5)
    world.crash_server("s1", Cause.SERVER_CRASH)
    assert world.run(LONG_ENOUGH_S) is RunState.FINISHED
    restarts = [action for action in orders(world, RestartServer) if action.name == "s1"]
    assert len(restarts) == CONFIG.restart.server


def test_running_out_of_memory_ends_at_settings_that_fit():
    world = begun()
    world.run(8)
    for _ in range(2):
        world.crash_server("s0", Cause.SERVER_OOM, RanOut.SERVER_DEVICE)
        world.run(8)
    world.crash_trainer(Cause.TRAINER_OOM, RanOut.TRAINER_DEVICE)
    assert world.run(LONG_ENOUGH_S) is RunState.FINISHED
    assert world.memory.mem_fraction_static == 0.6
    assert world.memory.max_tokens_per_mb == CONFIG.actor.mb_spec.max_tokens_per_mb // 2


class Storms(RuleBasedStateMachine):
    """Any fault at any moment; each tick checks its plan against the truth (`check_plan`)."""

    @initialize()
    def start(self):
        self.world = begun()

    @rule(seconds=st.integers(1, 6))
    def go_on(self, seconds):
        self.world.run(seconds)

    @rule(name=st.sampled_from(NAMES), cause=st.sampled_from([Cause.SERVER_CRASH, Cause.SERVER_HANG, Cause.NODE_LOST]))
    def lose_a_server(self, name, cause):
        self.world.crash_server(name, cause)

    @rule(name=st.sampled_from(NAMES), ran_out=st.sampled_from([RanOut.SERVER_DEVICE, RanOut.SERVER_POOL_TOO_SMALL]))
    def run_a_server_out_of_memory(self, name, ran_out):
        self.world.crash_server(name, Cause.SERVER_OOM, ran_out)

    @rule(name=st.sampled_from(NAMES))
    def drop_a_load(self, name):
        self.world.drop_load(name)

    @rule(name=st.sampled_from(NAMES))
    def wake_an_old_server(self, name):
        self.world.sleep_through_a_restore(name)

    @rule(name=st.sampled_from(NAMES))
    def corrupt(self, name):
        self.world.corrupt(name)

    @rule(cause=st.sampled_from([Cause.TRAINER_CRASH, Cause.TRAINER_HANG]))
    def lose_the_trainer(self, cause):
        self.world.crash_trainer(cause)

    @rule()
    def run_the_trainer_out_of_memory(self):
        self.world.crash_trainer(Cause.TRAINER_OOM, RanOut.TRAINER_DEVICE)

    @rule()
    def damage_the_policy(self):
        self.world.trainer.is_damaged = True

    @rule()
    def break_the_verifier(self):
        self.world.verifier_broke_at = self.world.verifier_broke_at or (self.world.now, self.world.trainer.next_step)

    @rule()
    def mend_the_verifier(self):
        self.world.verifier_broke_at = None

    @rule()
    def tear_a_checkpoint(self):
        self.world.tear_newest_checkpoint()

    @rule()
    def let_the_next_action_fail(self):
        self.world.fail_next = True

    @rule(there=st.booleans())
    def abort_perhaps(self, there):
        self.world.abort_reason = "Ctrl-C" if there and self.world.now > 160 else self.world.abort_reason

    def teardown(self):
        if hasattr(self, "world"):
            assert self.world.run(LONG_ENOUGH_S) in ENDS


TestStorms = Storms.TestCase
TestStorms.settings = hypothesis_settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)


def test_without_the_look_at_what_is_under_way_a_repair_would_be_ordered_again(monkeypatch):
    monkeypatch.setattr(PlanBuilder, "does", lambda self, kind, name="": any(isinstance(a, kind) for a in self.actions))
    world = begun()
    with pytest.raises(AssertionError, match="ordered while under way"):
        world.run(LONG_ENOUGH_S)


def test_without_onset_and_certificate_the_damage_would_be_restored(monkeypatch):
    """Each of the two alone saves this run."""
    monkeypatch.setattr("launcher.policy.restore.first_damaged", lambda incident: 10**6)
    assert begun(collapses_at_step=20).run(40) is not RunState.ERRORED
    good = JudgedCheckpoint(status=CheckpointStatus.GOOD, reason="")
    monkeypatch.setattr("tests.support.simulated_run.recovery_world.checkpoint_status", lambda *args, **kwargs: good)
    with pytest.raises(AssertionError, match="restored the damage"):
        begun(collapses_at_step=20).run(LONG_ENOUGH_S)
