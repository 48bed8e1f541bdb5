"""Rewards that break outside the weights, with and without a check of known answers: the Coordinator with a small
trainer (tests/programs/foreign_trainer.py), real processes, no Ray. With the driver:
tests/ray/foreign/test_foreign_trainer.py.
"""

import asyncio
import re
import sys

import pytest

from actors.foreign import command_trainer
from actors.foreign.foreign_checkpoints import ForeignCheckpoints
from actors.foreign.foreign_process import mark_of
from actors.foreign.reward_check import Objection, objection
from actors.processes.hosted_process import ProcessHost
from actors.processes.process_tree import bearing
from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.errors import CheckpointError
from launcher.base.messages import TerminalStatus
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.journal import read_lines
from tests.support.machine import scaled
from tests.support.run_memory import history_of
from tests.support.worlds.foreign import (
    as_killed,
    assert_sound,
    broken,
    causes,
    coordinator_of,
    events,
    given_up,
    mended,
    until,
)
from tests.support.worlds.foreign import config as config
from tests.support.worlds.foreign import paths as paths


@pytest.mark.slow
def test_rewards_that_fall_while_the_check_fails_are_awaited_and_the_run_goes_on_from_before_them(
    config, paths, tmp_path, monkeypatch
):
    config.trainer.reward_check = f"{sys.executable} check.py"
    monkeypatch.setattr(command_trainer, "CHECK_EVERY_S", 0.5)

    async def run():
        coordinator = coordinator_of(config, paths)
        running = await broken(coordinator, tmp_path)
        await until(lambda: awaits(paths), running)
        assert coordinator.trainer.pid == 0
        (tmp_path / "environment").unlink()  # and nobody says so
        return await running

    assert_sound(asyncio.run(run()), paths, tmp_path)
    assert causes(paths) == [("verifier_broken", True)]
    (broke,) = events(paths, "health.verifier_broken")
    assert broke["reason"].startswith("trainer.reward_check ended with exit code 1: 4 is not 4; ")
    assert [event["global_step"] for event in events(paths, "trainer.restored")] == [broke["onset_step"] - 1]
    assert len(events(paths, "repair.begun")) == 1, "no budget is spent by waiting"
    assert not events(paths, "checkpoint.condemned"), "the reward function is at fault, and no weights"
    assert events(paths, "checkpoint.set_aside")
    assert len(events(paths, "health.mended")) == 1


@pytest.mark.slow
def test_one_that_is_mended_before_the_restore_goes_on_from_before_the_onset_all_the_same(
    config, paths, tmp_path, monkeypatch
):
    config.trainer.reward_check = f"{sys.executable} check.py"
    config.restart.wait_initial_s = scaled(2)  # the reward function is asked again before the next restore
    monkeypatch.setattr(command_trainer, "CHECK_EVERY_S", 0.2)
    prepare, failed = ForeignCheckpoints.prepare, []

    async def fails_once(self, step, lines):
        if step != FIRST_WEIGHTS and not failed:
            failed.append(step)
            (tmp_path / "environment").unlink()
            raise CheckpointError("as the test asked for")
        await prepare(self, step, lines)

    monkeypatch.setattr(ForeignCheckpoints, "prepare", fails_once)

    async def run():
        return await (await broken(coordinator_of(config, paths), tmp_path))

    assert_sound(asyncio.run(run()), paths, tmp_path)
    assert [event["global_step"] for event in events(paths, "trainer.restored")] == failed
    assert len(events(paths, "health.mended")) == 1


def awaits(paths):
    """The run was restored to before the onset, and is paused until the reward function is mended."""
    states = [line["state"] for line in read_lines(paths.events) if "state" in line]
    return events(paths, "trainer.loaded")[1:] and states[-1] == "PAUSED"


@pytest.mark.slow
def test_a_coordinator_that_is_killed_while_it_waits_is_followed_by_one_that_waits_on(
    config, paths, tmp_path, monkeypatch
):
    config.trainer.reward_check = f"{sys.executable} check.py"
    config.restart.restore = 2
    monkeypatch.setattr(command_trainer, "CHECK_EVERY_S", 0.5)

    async def run():
        with as_killed():
            killed = await broken(coordinator_of(config, paths), tmp_path)
            await until(lambda: awaits(paths), killed)
            killed.cancel()
            await asyncio.gather(killed, return_exceptions=True)
        coordinator = coordinator_of(config, paths)
        follower = asyncio.create_task(coordinator.run())
        await until(lambda: len(events(paths, "trainer.loaded")) == 3, follower)
        await until(lambda: awaits(paths), follower)
        assert coordinator.trainer.pid == 0
        (tmp_path / "environment").unlink()
        return await follower

    assert_sound(asyncio.run(run()), paths, tmp_path)
    assert causes(paths) == [("verifier_broken", True)]


@pytest.mark.slow
def test_a_reward_function_that_stays_broken_ends_the_run(config, paths, tmp_path):
    config.trainer.reward_check = f"{sys.executable} check.py"
    config.reward_health.verifier_patience_s = 1.0
    outcome = asyncio.run(given_up(config, paths, tmp_path))
    assert outcome.reason.startswith("the reward function is broken: trainer.reward_check ended with exit code 1")
    assert causes(paths) == [("verifier_broken", False)]
    (tmp_path / "environment").unlink()
    assert_sound(asyncio.run(coordinator_of(config, paths, 2).run()), paths, tmp_path)


@pytest.mark.slow
def test_where_one_step_shows_too_little_several_decide_and_none_of_them_is_written(config, paths, tmp_path):
    config.reward_health.noise_floor = 0.35
    config.reward_health.fall_threshold = None

    assert_sound(asyncio.run(mended(config, paths, tmp_path)), paths, tmp_path)
    (why,) = [event["reason"] for event in events(paths, "health.outside_weights")]
    assert re.search(r"earn 0 now in \d steps", why), why
    restored = [event["time"] for event in events(paths, "trainer.restored")]
    written = [line["time"] for line in read_lines(paths.metrics)]
    assert len(restored) == 2
    assert not [moment for moment in written if restored[0] < moment < restored[1]]


@pytest.mark.slow
def test_a_reward_function_that_is_broken_before_the_first_step_starts_nothing(config, paths, tmp_path):
    config.trainer.reward_check = f"{sys.executable} check.py"
    (tmp_path / "environment").touch()
    outcome = asyncio.run(coordinator_of(config, paths).run())
    assert outcome.status is TerminalStatus.ERRORED
    assert "exit code 1: 4 is not 4; the trainer was not started" in outcome.reason
    assert not events(paths, "trainer.starting")


def test_a_stop_while_the_first_check_runs_ends_the_run_and_starts_nothing(config, paths):
    config.trainer.reward_check = "sleep 3600"

    async def run():
        coordinator = coordinator_of(config, paths)
        running = asyncio.create_task(coordinator.run())
        await until(lambda: bearing(mark_of(paths)), running)
        coordinator.abort("asked by a test")
        async with asyncio.timeout(scaled(30)):
            return await running

    assert asyncio.run(run()).status is TerminalStatus.ABORTED
    assert not events(paths, "trainer.starting")
    assert bearing(mark_of(paths)) == []


def test_a_stop_that_comes_as_the_check_has_just_started_does_not_wait_for_its_end(config, paths, monkeypatch):
    config.trainer.reward_check = "sleep 3600"
    take = ProcessHost._take_message

    async def run():
        asked = asyncio.Event()

        def taken(host, told):
            asked.set()
            take(host, told)

        monkeypatch.setattr(ProcessHost, "_take_message", taken)
        async with asyncio.timeout(scaled(20)):
            return await objection(config, paths, adapter_of(config.trainer), asked, {})

    assert asyncio.run(run()) is None
    assert bearing(mark_of(paths)) == []


def test_a_check_that_does_not_end_or_can_not_be_run_is_no_pass_and_shows_nothing(config, paths):
    def found(check, **variables):
        config.trainer.reward_check = check
        return asyncio.run(objection(config, paths, adapter_of(config.trainer), asyncio.Event(), variables))

    config.reward.setup_timeout = 0.5
    why = "trainer.reward_check did not end within reward.setup_timeout=0.5"
    assert found("sleep 60") == Objection(why=why, is_known=False)
    assert bearing(mark_of(paths)) == []
    config.reward.setup_timeout = scaled(60)
    assert found("true") is found(None) is None
    assert found("sh -c 'echo 4 is not 4; exit 1'") == Objection(
        why="trainer.reward_check ended with exit code 1: 4 is not 4", is_known=True
    )
    for not_run, exit_code in (("no-such-program", "127"), ("sh -c 'kill -9 $$'", "-9")):
        assert f"ended with exit code {exit_code}" in found(not_run).why
        assert not found(not_run).is_known
    its_path = "sh -c 'test $PYTHONPATH = of/the/trainer'"
    assert found(its_path, PYTHONPATH="of/the/trainer") is None
    assert found(its_path).is_known


@pytest.mark.slow
def test_a_check_that_does_not_end_accuses_nobody_and_the_first_steps_after_a_restore_decide(config, paths, tmp_path):
    (tmp_path / "check.py").write_text("import os, time\nos.path.exists('environment') and time.sleep(3600)")
    config.trainer.reward_check = f"{sys.executable} check.py"
    config.reward.setup_timeout = scaled(2)
    assert_sound(asyncio.run(mended(config, paths, tmp_path)), paths, tmp_path)
    (unknown,) = events(paths, "trainer.unwatched")
    assert "did not end within reward.setup_timeout" in unknown["reason"]
    assert unknown["reason"].endswith(
        "it is not known whether the reward function is at fault: check trainer.reward_check"
    )
    assert not events(paths, "health.verifier_broken")
    assert causes(paths) == [("reward_collapse", False), ("outside_weights", False)]


@pytest.mark.slow
def test_a_coordinator_that_is_killed_before_its_first_start_is_followed_by_one_that_starts(config, paths, tmp_path):
    """Of a run that was given up while its rewards were broken, and is started again: nobody waits any more."""
    asyncio.run(given_up(config, paths, tmp_path))
    (tmp_path / "environment").unlink()
    killed = history_of(paths.events, 2)
    killed.begin("the command is starting")
    asyncio.run(killed.flush())
    assert_sound(asyncio.run(coordinator_of(config, paths, 2).run()), paths, tmp_path)
