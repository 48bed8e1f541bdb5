"""Every tool takes the same checkpoint from the same files, and none that was not seen healthy before and after it."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from launcher.checkpoints.health_evidence import Seen
from launcher.checkpoints.trial_folders import find_trial
from launcher.policy.checkpoint_status import CheckpointStatus
from scripts import check_health, diagnose, list_checkpoints, resume_training, setup_recovery
from scripts.checkpoints.choosing import read_catalog
from tests.support.checkpoint_makers import learned, make_trial, write_areal_log, write_rewards
from tests.support.trial_names import EXPERIMENT, NAMES, TRIAL, USER, name_of


def level(step):
    """0.4 to 0.8 within 200 steps, with a batch now and then that is harder."""
    return min(0.4 + step / 500, 0.8) + 0.02 * (step % 3 - 1) - 0.05 * (step % 17 == 0)


def falling(steps, onset):
    return {step: level(step) if step < onset else 0.0 for step in steps}


@pytest.fixture
def trial(tmp_path):
    """Writes a log and exports of some steps; returns the trial."""

    def make(rewards, checkpoints, *, log="trainer.log"):
        default = tmp_path / "checkpoints" / USER / EXPERIMENT / TRIAL / "default"
        for step in checkpoints:
            folder = default / str(name_of(step))
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            save_file({"weight": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
            (folder / "tokenizer_config.json").write_text("{}")
        file = tmp_path / "logs" / USER / EXPERIMENT / TRIAL / log
        if log.endswith(".csv"):
            file.parent.mkdir(parents=True)
            rows = "".join(f"{step},{reward:.4f}\n" for step, reward in rewards.items())
            file.write_text("Step,exp_t1_train - ppo_actor/task_reward/avg\n" + rows)
        else:
            write_areal_log(file, rewards)
        return find_trial(tmp_path, USER, EXPERIMENT, TRIAL)

    return make


@pytest.fixture
def tell(capsys, tmp_path):
    def run(tool, *flags):
        code = tool.main(["--fileroot", str(tmp_path), *NAMES, *flags])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def advised(trial, tell):
    """What list_checkpoints and diagnose say, each a step or None: they must agree."""
    good = read_catalog(trial).newest_first(good=True)
    listed = good[0].global_step if good else None
    said = json.loads(tell(diagnose, "--json")[1])
    found = said["last_good_checkpoint"]
    return listed, None if found is None else found["global_step"]


def test_a_log_that_begins_inside_the_zeros_vouches_for_nothing_before_it(trial, tell):
    """Said of step 899 was: good, 33 healthy steps after it; by another tool 799."""
    found = trial(falling(range(935, 1100), 0), (799, 899, 999))
    assert advised(found, tell) == (None, None)
    entries = {one.global_step: one for one in read_catalog(found).entries}
    assert read_catalog(found).presumed(entries[899]).reason.startswith("0 healthy steps after it")
    assert read_catalog(found).presumed(entries[999]).status is CheckpointStatus.CONDEMNED
    code, said = tell(resume_training, "--yes", "--command", "python x.py")
    assert code == 1
    assert "no file shows steps 0 to 934" in said
    _, said = tell(diagnose)
    assert "the fall is earlier" in said
    assert "--before-step" not in said


def test_a_log_that_begins_late_but_before_the_fall_shows_what_it_shows(trial, tell):
    assert advised(trial(falling(range(850, 1000), 940), (799, 899, 999)), tell) == (899, 899)


def test_a_sampled_chart_is_gone_back_from_to_before_its_last_good_samples(trial, tell):
    """Advised was --before-step 189: a poisoned one."""
    found = trial(falling(range(0, 400, 10), 181), range(9, 400, 5), log="chart.csv")
    listed, diagnosed = advised(found, tell)
    assert listed == diagnosed == 159  # 160, 170 and 180 were seen
    assert "--before-step 160 " in tell(diagnose)[1]


def test_a_hole_around_the_onset_is_gone_back_before(trial, tell):
    """Advised was --before-step 249."""
    steps = [step for step in range(400) if not 151 <= step <= 249]
    listed, diagnosed = advised(trial(falling(steps, 188), range(4, 400, 5)), tell)
    assert listed == diagnosed == 144


def test_a_full_log_is_gone_back_from_to_just_before_the_fall(trial, tell):
    assert advised(trial(falling(range(400), 188), range(180, 195)), tell) == (186, 186)


def test_of_each_step_it_is_told_what_was_seen_and_where(trial):
    steps = [step for step in range(120) if step != 50]
    health = read_catalog(trial({**falling(steps, 100), 60: float("nan")}, (20,))).health
    looked = [health.of(step)[0] for step in (49, 50, 60, 99, 100, 119, 120)]
    assert looked == [Seen.HEALTHY, Seen.NOT_SEEN, Seen.UNREADABLE, Seen.HEALTHY, Seen.BAD, Seen.BAD, Seen.NOT_SEEN]
    assert health.of(49)[1].endswith("trainer.log")
    assert health.of(50)[1] == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_log_that_may_not_be_read_is_named(trial, tell):
    found = trial(falling(range(100), 1000), (20, 60))
    (found.logs / "trainer.log").chmod(0)
    assert "can't be read" in tell(list_checkpoints)[1]


def test_a_packed_log_is_named_and_vouches_for_nothing(trial, tell):
    found = trial(falling(range(100), 1000), (20, 60))
    (found.logs / "trainer.log").write_bytes(b"\x1f\x8b" + bytes(100))
    os.utime(found.logs / "trainer.log", (1.79e9, 1.79e9))  # a young one may be another machine's
    _, said = tell(list_checkpoints)
    assert "no good checkpoint; not all could be read: " in said
    assert "trainer.log can't be unpacked" in said
    assert tell(resume_training, "--yes", "--command", "python x.py")[0] == 1


def test_of_a_run_of_ours_every_tool_names_the_same_checkpoint(tell, tmp_path, capsys):
    paths = make_trial(tmp_path, learned(tmp_path / "model"), (5, 15, 25, 38, 50))
    write_rewards(paths, [*falling(range(60), 40).values()])
    capsys.readouterr()
    found = {}
    for tool, key in ((list_checkpoints, "last_good"), (diagnose, "last_good_checkpoint"), (check_health, "findings")):
        found[tool] = json.loads(tell(tool, "--json")[1])[key]
    (seen,) = [one["facts"]["last_good"] for one in found[check_health] if "last_good" in one["facts"]]
    assert (found[list_checkpoints], found[diagnose]["global_step"], seen) == (38, 38, 38)
    assert json.loads(tell(setup_recovery, "--good", "--json")[1])["step"] == 38
