"""A restore that no step has borne out yet, and its trainer or its Coordinator ends: what is resumed from, what is said
and what is put back. Real processes, no Ray; the same run as in test_reward_check.py."""

import asyncio
import json
import time

import pytest

from actors.foreign.foreign_checkpoints import ForeignCheckpoints, left_by_predecessors
from actors.foreign.foreign_learning import LearningWatch
from actors.foreign.foreign_process import mark_of
from actors.foreign.foreign_steps import ForeignSteps
from actors.processes.process_tree import bearing, command_line
from launcher.adapters.foreign_health import Unproven, unproven_of
from launcher.adapters.trainer_adapter import StepSeen
from launcher.base.messages import TerminalStatus
from launcher.config.supervision import RewardHealthConfig
from launcher.policy.restore import FIRST_WEIGHTS
from launcher.run_files.journal import read_lines
from tests.support.foreign.foreign_run import PROGRAM
from tests.support.run_memory import history_of
from tests.support.worlds.foreign import (
    HELD,
    as_killed,
    assert_sound,
    broken,
    causes,
    config,
    coordinator_of,
    events,
    last_step,
    mended,
    paths,
    until,
)

__all__ = ["config", "paths"]
SAVED = '            whole.rename(folder / "state.json")\n'
CRASH = (
    '        if given.resume and take(Path("crash")):\n            sys.exit("RuntimeError: as the test asked for")\n'
)


async def killed_at(monkeypatch, method, config, paths, tmp_path, *, restores=None):
    """A run whose rewards broke at step 26, and whose Coordinator is killed as it begins this method."""
    real = getattr(ForeignCheckpoints, method)

    async def is_killed(self, *arguments, **named):
        if restores is None or restores(arguments):
            raise asyncio.CancelledError
        return await real(self, *arguments, **named)

    monkeypatch.setattr(ForeignCheckpoints, method, is_killed)
    coordinator = coordinator_of(config, paths)
    with as_killed():
        await asyncio.wait([await broken(coordinator, tmp_path)])
    monkeypatch.setattr(ForeignCheckpoints, method, real)
    return coordinator


@pytest.mark.slow
def test_what_a_restored_trainer_saved_before_it_crashed_is_not_resumed_from(config, paths, tmp_path):
    """Its step was trained on rewards at 0, and is older than the step at which they fell."""
    program = tmp_path / PROGRAM.name
    text = program.read_text()
    assert SAVED in text
    program.write_text(text.replace(SAVED, SAVED + CRASH))
    (tmp_path / "crash").touch()
    config.restart.restore = 3
    config.reward_health.noise_floor = 0.35
    config.reward_health.fall_threshold = None  # several steps decide

    assert_sound(asyncio.run(mended(config, paths, tmp_path)), paths, tmp_path)
    first, again, last = [event["global_step"] for event in events(paths, "trainer.restored")]
    assert again == first < last == events(paths, "health.outside_weights")[0]["onset_step"] - 1
    assert (tmp_path / "out" / "set_aside" / f"step-{first + 1}.unproven-1").is_dir()
    assert causes(paths)[:1] == [("reward_collapse", False)]


@pytest.mark.slow
def test_a_coordinator_that_is_killed_before_it_restores_leaves_no_restore_that_could_be_contradicted(
    config, paths, tmp_path, monkeypatch
):
    async def run():
        killed = await killed_at(
            monkeypatch, "prepare", config, paths, tmp_path, restores=lambda its: its[0] != FIRST_WEIGHTS
        )
        with (tmp_path / "log.jsonl").open("a") as file:  # it steps until its stop has reached it
            step = {"step": last_step(killed) + 2, "reward": 0.0, "loss": 0.1, "time": time.time()}
            print(json.dumps(step), file=file)
        follower = asyncio.create_task(coordinator_of(config, paths).run())
        await until(lambda: events(paths, "trainer.restored", "health.outside_weights"), follower)
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)

    asyncio.run(run())
    assert events(paths, "trainer.restored")
    assert not events(paths, "health.outside_weights")


@pytest.mark.slow
def test_a_coordinator_that_is_killed_before_it_put_them_back_is_followed_by_one_that_does(
    config, paths, tmp_path, monkeypatch
):
    async def run():
        await killed_at(monkeypatch, "put_back", config, paths, tmp_path)
        return await coordinator_of(config, paths).run()

    assert asyncio.run(run()).status is TerminalStatus.ERRORED
    assert not any("condemned" in path.name for path in (tmp_path / "out" / "set_aside").iterdir())
    (contradicted,) = events(paths, "health.outside_weights")
    (tmp_path / "environment").unlink()
    assert_sound(asyncio.run(coordinator_of(config, paths, 2).run()), paths, tmp_path)
    assert events(paths, "trainer.restored")[-1]["global_step"] == contradicted["onset_step"] - 1


@pytest.mark.slow
def test_a_stop_while_the_check_is_asked_condemns_nothing(config, paths, tmp_path):
    async def run():
        coordinator = coordinator_of(config, paths)
        running = asyncio.create_task(coordinator.run())
        await until(lambda: last_step(coordinator) >= 25, running)
        config.trainer.reward_check = "sleep 3600"
        (tmp_path / "environment").touch()
        (tmp_path / HELD).unlink()
        await until(lambda: events(paths, "health.reward_collapse"), running)
        await until(lambda: any("sleep" in command_line(one) for one in bearing(mark_of(paths))), running)
        coordinator.abort("asked by a test")
        return await running

    assert asyncio.run(run()).status is TerminalStatus.ABORTED
    assert not events(paths, "checkpoint.condemned")
    assert not (tmp_path / "out" / "set_aside").exists()


async def test_a_sound_step_bears_a_restore_out_whatever_state_the_run_is_in(config, paths):
    """A server may be under repair all the while, or the trainer ends before the Coordinator's next look."""
    trainer = coordinator_of(config, paths).trainer
    history = trainer._history
    history.event("health.reward_collapse", subject="policy", reason="", onset_step=37)
    history.event("trainer.restored", subject="trainer", reason="", global_step=30)
    history.event("checkpoint.condemned", subject="checkpoints", reason="", moved=[["a", "b"]])
    history.event("trainer.starting", subject="trainer", reason="")
    trainer._learning.restored(30, 37)
    trainer.steps.lines = [{"global_step": step, "rollout/reward": 0.6} for step in range(31)]
    assert trainer._take_steps([StepSeen(step=31, reward=0.6)]) is None
    assert unproven_of(history.command_events) is None
    assert left_by_predecessors(history.command_events)[0] == []
    assert trainer._take_steps([StepSeen(step=32, reward=0.6)]) is None
    assert [event["global_step"] for event in events(paths, "trainer.stepped")] == [31]


def test_rewards_that_stay_at_0_after_a_restore_are_not_said_to_be_over(paths):
    steps, history = ForeignSteps(paths, 1, list(read_lines(paths.events))), history_of(paths.events)
    settings = RewardHealthConfig(zero_alert_steps=2, zero_breaker_steps=3, noise_floor=0.35, fall_threshold=None)
    watch = LearningWatch(settings, history)

    def earn(step, reward):
        steps.take_step(StepSeen(step=step, reward=reward), float(step))
        return watch.find(steps.lines, float(step))

    damage = [earn(step, 0.0 if step >= 37 else 0.6) for step in range(40)]
    assert damage[-1] is not None
    assert len(events(paths, "reward.alert")) == 1
    steps.begin(30)
    watch.restored(30, 37)
    assert earn(31, 0.0) is None
    assert not events(paths, "reward.alert_over")
    assert earn(32, 0.6) is None
    assert len(events(paths, "reward.alert_over")) == 1


COLLAPSE = {"event": "health.reward_collapse", "onset_step": 24}
RESTORED, STARTING = {"event": "trainer.restored", "global_step": 19}, {"event": "trainer.starting", "time": 7.0}
ASIDE = {"event": "checkpoint.condemned", "moved": [["out/a", "out/set_aside/a.condemned-1"]]}
STEPS = {"event": "trainer.stepped"}


def test_a_restore_is_unproven_from_its_start_until_the_run_steps(paths):
    unproven = Unproven(onset_step=24, restored_step=19, since=7.0, is_contradicted=False)
    assert unproven_of((STEPS, COLLAPSE, RESTORED, STARTING)) == unproven
    assert unproven_of((STEPS, COLLAPSE, RESTORED, STARTING, RESTORED, STARTING)) == unproven
    for lines in (
        (STEPS, COLLAPSE, RESTORED),
        (STEPS, COLLAPSE, RESTORED, STARTING, STEPS),
        (STEPS, COLLAPSE, RESTORED, STARTING, {"event": "run.running"}),
        (STEPS, COLLAPSE, RESTORED, STARTING, STEPS, STARTING),
        (STEPS, COLLAPSE, {**RESTORED, "global_step": -1}, STARTING),
        (RESTORED, COLLAPSE, STARTING),
    ):
        assert unproven_of(lines) is None


def test_what_can_come_back_is_what_was_set_aside_since_the_run_stepped(paths):
    prepared = {"event": "checkpoint.prepared", "global_step": 19}
    moved, was_prepared, _ = left_by_predecessors((STEPS, COLLAPSE, prepared, ASIDE, RESTORED, STARTING))
    assert [(str(path), str(target)) for path, target in moved] == [("out/a", "out/set_aside/a.condemned-1")]
    assert was_prepared
    assert left_by_predecessors((ASIDE, prepared, STEPS)) == ([], False, False)
    reinstated = {"event": "checkpoint.reinstated"}
    assert left_by_predecessors((ASIDE, prepared, reinstated)) == ([], False, True)
