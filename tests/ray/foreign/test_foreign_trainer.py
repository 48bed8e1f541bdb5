"""Another project's trainer under the launcher: real driver, Ray, process host, and a small trainer that takes faults
(tests/programs/foreign_trainer.py)."""

import json
import os
import random
import shutil
import signal
import sys

import pytest

from launcher.run_files.journal import current_lines, read_lines
from scripts import check_health, report, run_control
from tests.support.foreign.foreign_run import PROGRAM, ForeignRun
from tests.support.kept_runs import kill_command

pytestmark = pytest.mark.timeout(900)

SAVED = ("trainer.checkpoints=out/step-*", "trainer.checkpoint_file=state.json", "trainer.resume='--resume *'")
QUICK = ("health.trainer_silence_s=3", "reward_health.zero_breaker_steps=6", "restore.good_after_steps=10")
SEED = 20261122


def begin(folder, *, steps, settings=(), name="foreign", words=""):
    shutil.copy(PROGRAM, folder)
    command = f"{sys.executable} {PROGRAM.name} --steps {steps} --metrics log.jsonl --step-s 0.1 {words}"
    return ForeignRun(folder, command, "trainer.metrics=log.jsonl", *SAVED, *QUICK, *settings, name=name)


def undisturbed(steps):
    """What the trainer has learned after so many steps, each taken once."""
    weight = 1
    for step in range(1, steps + 1):
        weight = (weight * 31 + step) % 1_000_003
    return weight


def learned(folder, step):
    return json.loads((folder / "out" / f"step-{step}" / "state.json").read_text())["weight"]


def test_killed_stopped_collapsed_and_without_its_supervisor_it_ends_as_without_faults(tmp_path, capsys):
    chance, steps = random.Random(SEED), 270
    (tmp_path / "break-200").touch()  # long after step 120: the trainer takes ten steps a second, whoever is late
    (tmp_path / "exit-230").touch()
    (tmp_path / "nan-250").touch()
    with begin(tmp_path, steps=steps, words="--child") as run:
        for number in range(4):
            run.wait_steps(number * 20 + chance.randint(8, 20))
            killed = run.kill_trainer()
            run.wait_until(lambda killed=killed: run.trainer_pid() not in (None, killed), "it is restarted")
        run.wait_steps(100)
        assert check_health.main([str(run.paths.logs)]) == 0, capsys.readouterr().out
        run.kill_trainer(signal.SIGSTOP)
        run.wait_until(lambda: ("trainer_hang", True) in run.incidents(), "the hang is over")
        run.wait_steps(120)
        os.kill(run.events("coordinator.placed")[-1]["pid"], signal.SIGKILL)
        run.wait_until(lambda: len(run.events("coordinator.adopted")) == 1, "its supervisor is back")
        assert run.wait_end() == 0, run.said()
        causes = [cause for cause, _ in run.incidents()]
        assert all(is_mended for _, is_mended in run.incidents())
        assert {*causes} == {"trainer_crash", "trainer_hang", "reward_collapse", "nonfinite"}
        assert causes.count("trainer_crash") == 6  # four kills, one with its supervisor, one exit code
        assert causes.count("reward_collapse") == causes.count("trainer_hang") == 1
        assert run.steps() == list(range(1, steps + 1))
        assert learned(tmp_path, steps) == undisturbed(steps), "no step is left out, or taken twice"
        assert run.tree() == [], "nor its daemon"
    (collapse,) = [event for event in run.events("incident.began") if event["cause"] == "reward_collapse"]
    assert abs(collapse["onset_step"] - 200) <= 1
    restored = [e["global_step"] for e in run.events("trainer.restored") if e["incident"] == collapse["incident"]]
    assert restored == [195]
    assert list((tmp_path / "out" / "set_aside").glob("step-200.condemned-*"))
    (hang,) = [event for event in run.events("incident.began") if event["cause"] == "trainer_hang"]
    assert (run.paths.incident(hang["incident"]) / "stacks" / "trainer.txt").stat().st_size
    assert (run.paths.incident(hang["incident"]) / "trainer.log.tail").exists()
    assert check_health.main([str(run.paths.logs)]) == 0
    assert report.main([str(run.paths.logs)]) == 0
    assert "reward_collapse" in capsys.readouterr().out + run.paths.report.read_text()


def test_nobody_outlives_a_killed_driver_and_the_same_command_resumes(tmp_path):
    run = begin(tmp_path, steps=80, words="--child")
    with run:
        run.wait_steps(12)
        before = run.tree()
        assert len(before) >= 2
        kill_command(run.driver.pid)
        run.driver.wait()
        run.driver = None
    with run:
        run.wait_until(lambda: len(run.events("trainer.starting")) == 2, "it starts again")
        assert not {*before} & {*run.tree()}
        run.wait_steps(40)
        run.driver.send_signal(signal.SIGINT)
        assert run.wait_end() == 130, run.said()
        assert run.tree() == []
    with run:
        assert run.wait_end() == 0, run.said()
    assert run.steps() == list(range(1, 81))
    assert learned(tmp_path, 80) == undisturbed(80)
    assert run.start().wait_end() == 0, "a run that is over is not run again"
    assert "nothing to do" in run.said()


def test_rewards_that_are_mended_while_it_waits_cost_no_step_and_no_checkpoint(tmp_path):
    check = "import os, sys\nos.path.exists('environment') and sys.exit('4 is not 4')"
    (tmp_path / "check.py").write_text(check)
    settings = (f"trainer.reward_check='{sys.executable} check.py'", "restart.restore=1")
    run = begin(tmp_path, steps=120, words="--every 1", settings=settings)
    with run:
        run.wait_steps(45)
        (tmp_path / "environment").touch()
        run.wait_until(lambda: len(run.events("trainer.loaded")) == 2, "it is back before the fall")
        run.wait_until(lambda: run_control.state_of(run.paths)[0] == "PAUSED", "it waits")
        assert run.trainer_pid() is None
        assert check_health.main([str(run.paths.logs)]) == 1
        (tmp_path / "environment").unlink()
        assert run.wait_end() == 0, run.said()
        assert run.tree() == []
    assert run.incidents() == [("verifier_broken", True)]
    (broken,) = run.events("health.verifier_broken")
    assert broken["reason"].startswith("trainer.reward_check ended with exit code 1: 4 is not 4; ")
    (resumed,) = run.events("trainer.restored")
    assert resumed["global_step"] == broken["onset_step"] - 1, "the newest that was sound"
    assert len(run.events("repair.begun")) == 1, "no budget is spent by waiting"
    assert_sound(run, 120)


def test_rewards_that_stay_broken_end_the_run_for_a_person_and_the_same_command_goes_on(tmp_path):
    run = begin(tmp_path, steps=120, words="--every 1")
    with run:
        run.wait_steps(45)
        (tmp_path / "environment").touch()
        assert run.wait_end() == 3, run.said()
        assert run.tree() == []
    assert "what changed is not the weights" in run.said()
    assert run.events("checkpoint.reinstated")
    assert run.incidents() == [("reward_collapse", False), ("outside_weights", False)]
    with run:  # not mended yet: the first step is asked, and nothing is given up
        assert run.wait_end() == 3, run.said()
    (tmp_path / "environment").unlink()
    with run:
        assert run.wait_end() == 0, run.said()
    onsets = [event["onset_step"] for event in run.events("health.outside_weights")]
    resumed = [event["global_step"] for event in run.events("trainer.restored")]
    assert resumed[1:] == [onset - 1 for onset in onsets], "the newest that was sound"
    assert len({*onsets}) == 1
    assert_sound(run, 120)


def assert_sound(run, steps):
    """Each step once, none on rewards that were broken, and no restore condemned what it had to leave."""
    rewards = [line["rollout/reward"] for line in current_lines(read_lines(run.paths.metrics))]
    assert run.steps() == list(range(1, steps + 1))
    assert min(rewards) > 0.1
    assert learned(run.folder, steps) == undisturbed(steps)


def test_a_command_that_fails_each_time_ends_the_run_with_its_own_words(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('no such data')")
    run = ForeignRun(tmp_path, f"{sys.executable} train.py", "restart.restore=2")
    with run:
        assert run.wait_end() == 3, run.said()
    assert "ValueError: no such data" in run.said()
    assert len(run.events("trainer.died")) == 3
    assert [event["reason"] for event in run.events("run.errored")]


def test_more_than_any_node_has_is_refused_before_the_command_is_started(tmp_path):
    (tmp_path / "train.py").touch()
    run = ForeignRun(tmp_path, f"{sys.executable} train.py", "trainer.num_gpus=99")
    with run:
        assert run.wait_end() == 2, run.said()
    assert "trainer.num_gpus=99, and no node has more than" in " ".join(run.said().split())
    assert not run.events("trainer.starting")


def test_a_pattern_that_matches_nothing_is_told_and_takes_nothing_down(tmp_path):
    shutil.copy(PROGRAM, tmp_path)
    pattern = 'trainer.pattern="epoch (?P<step>\\d+)"'
    run = ForeignRun(tmp_path, f"{sys.executable} {PROGRAM.name} --steps 20", pattern)
    with run:
        assert run.wait_end() == 0, run.said()
    assert "no step was seen: check trainer.pattern" in " ".join(run.said().split())
    assert run.steps() == []
