"""Runs made to fail in a known way: the cause, where memory ran out, what to change, and where to go back to."""

import dataclasses
import json
import random
import re

import pytest

from launcher.base.errors import DataError
from launcher.base.own_python import python
from launcher.checkpoints.onset import Shape
from launcher.diagnosis.judging.remedies import remedy_of
from launcher.diagnosis.judging.rules import Guess
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.diagnosis.output.as_json import to_dict
from launcher.policy.exit_cause import RanOut
from tests.support.made_logs import FAILURES, Made, RunMaker
from tests.support.worlds.diagnosis import diagnosis_of, export, made_run

CAUSES = {
    "crash": (RunCondition.FELL, Guess.SERVER_CRASH, ""),
    "hang": (RunCondition.FELL, Guess.SERVER_HANG, ""),
    "server_oom": (RunCondition.FELL, Guess.OUT_OF_MEMORY, "server, in generation"),
    "startup_oom": (RunCondition.STOPPED, Guess.OUT_OF_MEMORY, "server, at start-up"),
    "trainer_oom": (RunCondition.STOPPED, Guess.OUT_OF_MEMORY, "trainer, in training"),
    "transfer_oom": (RunCondition.STOPPED, Guess.OUT_OF_MEMORY, "trainer, in transfer"),
    "degradation": (RunCondition.FELL, Guess.DEGRADATION, ""),
    "reward_function": (RunCondition.FELL, Guess.REWARD_FUNCTION, ""),
}


def test_every_failure_has_its_cause():
    assert set(CAUSES) == set(FAILURES)


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("merged", [False, True], ids=["files", "merged"])
def test_the_cause_is_found(tmp_path, fails, merged):
    made = Made(fails=fails, onset=70, steps=150, old=merged, minibatches=2 if merged else 1, seed=5)
    found = diagnosis_of(RunMaker(made).write(tmp_path / "run", merged=merged))
    word, guess, where = CAUSES[fails]
    assert (found.condition, found.causes.first.guess, found.causes.first.where) == (word, guess, where)
    assert found.causes.is_sure
    assert found.causes.first.supporting
    if word is RunCondition.FELL:
        tolerance = 5 if fails == "degradation" else 0
        assert abs(found.onset.step - 70) <= tolerance
        others = [one for one in found.causes.ranked if one.guess is not guess]
        assert any(one.opposing for one in others)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("merged", [False, True], ids=["files", "merged"])
def test_a_healthy_run_has_no_failure(tmp_path, seed, merged):
    found = diagnosis_of(RunMaker(Made(seed=seed, steps=150)).write(tmp_path / "run", merged=merged))
    assert (found.condition, found.causes, found.restore_advice, found.onset) == (RunCondition.FINE, None, None, None)
    assert found.headline.startswith("no failure found in 150 steps")


def test_how_a_run_ends_that_did_all_its_steps_is_no_failure(tmp_path):
    logs = RunMaker(Made(steps=60)).write(tmp_path / "run")
    with (logs / "trainer.log").open("a") as log:
        log.write("20251111-12:00:00.000 SGLangServer INFO: SGLang server http://127.0.0.1:1 exits, returncode=-15\n")
    found = diagnosis_of(logs)
    assert found.condition is RunCondition.FINE
    assert found.headline.startswith("no failure that lasted in 60 steps"), "and not that none was found"
    text = (logs / "trainer.log").read_text()
    (logs / "trainer.log").write_text(text.replace("/60 done", "/600 done"))
    assert diagnosis_of(logs).condition is RunCondition.STOPPED


def test_a_healthy_run_that_is_not_done_says_so(tmp_path):
    logs = RunMaker(Made(steps=100)).write(tmp_path / "run")
    text = (logs / "trainer.log").read_text()
    (logs / "trainer.log").write_text(text[: text.index("Train step 61/100")])
    assert diagnosis_of(logs).condition is RunCondition.STALLED  # its server wrote on for 40 minutes
    found = diagnosis_of(logs / "trainer.log")
    assert found.condition is RunCondition.UNCLEAR
    assert found.headline.startswith("the log ends at step 60 of 100, and nothing in it says why")


@pytest.mark.parametrize(("fails", "guess"), [("hang", Guess.SERVER_HANG), ("crash", Guess.SERVER_CRASH)])
def test_a_run_whose_requests_fail_and_whose_steps_stop_has_stopped(tmp_path, fails, guess):
    """As AReaL does where failed rollouts are dropped: no reward is ever 0, and there is no next step."""
    logs = RunMaker(Made(fails=fails, onset=60, groups=20)).write(tmp_path / "run")
    text = (logs / "trainer.log").read_text()
    (logs / "trainer.log").write_text(text[: text.index("Train step 61/120")])
    found = diagnosis_of(logs)
    assert (found.condition, found.causes.first.guess, found.onset) == (RunCondition.STOPPED, guess, None)
    assert found.headline.startswith("the run stopped after global step 59")
    assert found.restore_advice.until is None


def test_without_the_servers_log_a_crash_is_still_told_from_a_hang(tmp_path):
    for fails, guess in (("crash", Guess.SERVER_CRASH), ("hang", Guess.SERVER_HANG)):
        logs = RunMaker(Made(fails=fails)).write(tmp_path / fails)
        found = diagnosis_of(logs / "trainer.log")
        assert found.causes.first.guess is guess
        assert any("llm_server.log" in text for text in found.causes.missing)


def test_from_figures_alone_nothing_is_accused_without_evidence(tmp_path):
    rows = "".join(f"{step},{0.5 if step < 60 else 0.0}\n" for step in range(100))
    (tmp_path / "export.csv").write_text("Step,run - ppo_actor/task_reward/avg\n" + rows)
    found = diagnosis_of(tmp_path / "export.csv")
    assert (found.condition, found.onset.step, found.onset.shape) == (RunCondition.FELL, 60, Shape.ZERO)
    assert not found.causes.is_sure
    assert "not to be seen" in found.headline
    assert len(found.causes.missing) == 2


def test_every_evidence_from_a_log_names_its_line(tmp_path):
    logs = RunMaker(Made(fails="crash")).write(tmp_path / "run")
    found = diagnosis_of(logs)
    refused = next(e for e in found.causes.first.supporting if "refused" in e.text)
    name, number = refused.where.split(":")
    assert "Connection" in (logs / name).read_text().splitlines()[int(number) - 1]
    assert "never before" in refused.text


def test_refusals_that_were_always_there_accuse_nobody(tmp_path):
    logs = RunMaker(Made(fails="degradation", onset=70, steps=150)).write(tmp_path / "run")
    text = (logs / "trainer.log").read_text()
    noise = "ConnectionRefusedError: [Errno 111] Connect call failed\n"
    (logs / "trainer.log").write_text(text.replace("Stats (1/1)", f"{noise}Stats (1/1)"))
    found = diagnosis_of(logs)
    crash = next(one for one in found.causes.ranked if one.guess is Guess.SERVER_CRASH)
    assert crash.score <= 0


def test_a_recovery_is_said_and_not_mended_twice(tmp_path):
    made = Made(fails="crash", onset=60, steps=150, recovers_at=90, back_to=50)
    found = diagnosis_of(RunMaker(made).write(tmp_path / "run"))
    assert (found.condition, found.onset.step, found.onset.stands) == (RunCondition.RECOVERED, 60, False)
    assert found.restore_advice is None
    assert "a recovery took it back" in found.headline
    assert any("went back once: 89 → 50" in note for note in found.notes)


def test_zeros_that_went_by_are_told_and_a_dip_is_none(tmp_path):
    zeros = RunMaker(Made(rewards=dict.fromkeys(range(60, 75), 0.0), steps=150)).write(tmp_path / "zeros")
    found = diagnosis_of(zeros)
    assert (found.condition, found.onset.step, found.onset.is_over) == (RunCondition.RECOVERED, 60, True)
    assert any("came back by themselves" in note for note in found.notes)
    dip = RunMaker(Made(rewards=dict.fromkeys(range(60, 75), 0.4), steps=150)).write(tmp_path / "dip")
    found = diagnosis_of(dip)
    assert (found.condition, found.onset, [one.step for one in found.others]) == (RunCondition.FINE, None, [60])


def test_rewards_beyond_all_reason_are_named(tmp_path):
    logs = RunMaker(Made(steps=80)).write(tmp_path / "run")
    text = (logs / "trainer.log").read_text()
    head, tail = text[: len(text) // 2], text[len(text) // 2 :]
    (logs / "trainer.log").write_text(
        head + re.sub(r"(ppo_actor/task_reward/avg\s+│\s+)\S+", r"\g<1>-2.34e+36", tail, count=1)
    )
    found = diagnosis_of(logs)
    assert found.condition is RunCondition.FINE
    assert any("far from all others" in note and "-2.34e+36" in note for note in found.notes)


def test_a_run_that_begins_with_zeros_only_accuses_the_reward_function(tmp_path):
    made = Made(rewards=dict.fromkeys(range(60), 0.0), steps=60)
    found = diagnosis_of(RunMaker(made).write(tmp_path / "run"))
    assert (found.condition, found.causes.first.guess) == (RunCondition.FELL, Guess.REWARD_FUNCTION)
    assert "0 from the first step" in found.headline


# ── the way back ──


def test_the_last_whole_checkpoint_before_the_onset_is_chosen(tmp_path):
    logs = made_run(tmp_path, Made(fails="crash", onset=60), steps=(19, 39, 79, 99))
    export(tmp_path / "checkpoints" / "me" / "exp" / "t0" / "default", 59, is_whole=False)
    way = diagnosis_of(logs).restore_advice
    assert (way.checkpoint.global_step, way.until) == (39, 58)  # step 59 was seen to earn what it should
    (command,) = way.commands
    assert command.startswith(f"{python()} -m scripts.resume_training --experiment-name exp --trial-name t0 --fileroot")
    assert "--before-step 40 --command " in command
    assert "fresh optimizer" in way.warning


def test_weights_that_degraded_accuse_the_checkpoint_next_to_the_onset(tmp_path):
    steps = (19, 39, 59, 68, 79)
    found = diagnosis_of(made_run(tmp_path, Made(fails="degradation", onset=70, steps=150), steps=steps))
    assert found.restore_advice.checkpoint.global_step <= 59
    assert found.restore_advice.until <= 67


def test_areals_recover_checkpoint_from_after_the_onset_is_warned_of(tmp_path):
    logs = made_run(tmp_path, Made(fails="crash", onset=60), steps=(19,))
    folder = tmp_path / "checkpoints" / "me" / "exp" / "t0" / "recover_info"
    folder.mkdir()
    (folder / "step_info.json").write_text(json.dumps({"epoch": 0, "epoch_step": 119, "global_step": 119}))
    assert "recover_checkpoint is of step 119" in diagnosis_of(logs).restore_advice.warning


@pytest.mark.parametrize("layout", ["checkpoints/exp/t0", "recover/exp/t0", "elsewhere"])
def test_other_layouts_are_found(tmp_path, layout):
    logs = made_run(tmp_path, Made(fails="crash", onset=60))
    export(tmp_path / layout, 39)
    given = tmp_path / layout if layout == "elsewhere" else None
    assert diagnosis_of(logs, checkpoints=given).restore_advice.checkpoint.global_step == 39


def test_without_a_checkpoint_folder_the_limit_is_said(tmp_path):
    way = diagnosis_of(RunMaker(Made(fails="crash", onset=60)).write(tmp_path / "run")).restore_advice
    assert way.checkpoint is None
    assert "step 58 or earlier" in way.reason
    assert "--before-step 59" in way.commands[0]


def test_a_run_that_stopped_undamaged_goes_on_from_its_newest(tmp_path):
    way = diagnosis_of(made_run(tmp_path, Made(fails="trainer_oom", onset=60), steps=(19, 39))).restore_advice
    assert (way.checkpoint.global_step, way.until) == (39, None)
    assert not any("--before-step" in command for command in way.commands)


# ── what to change ──

SETTINGS = {
    "sglang.mem_fraction_static": 0.8,
    "rollout.max_concurrent_rollouts": 64,
    "actor.mb_spec.max_tokens_per_mb": 16384,
    "actor.gradient_checkpointing": False,
    "gconfig.max_new_tokens": 1024,
    "gconfig.n_samples": 8,
    "rollout.request_timeout": 3600,
    "actor.optimizer.lr": 1e-5,
}


@pytest.mark.parametrize(
    ("guess", "more", "overrides"),
    [
        (Guess.OUT_OF_MEMORY, {"ran_out": RanOut.SERVER_DEVICE}, ("sglang.mem_fraction_static=0.7",)),
        (Guess.OUT_OF_MEMORY, {"ran_out": RanOut.SERVER_POOL}, ("rollout.max_concurrent_rollouts=32",)),
        (Guess.OUT_OF_MEMORY, {"ran_out": RanOut.TRAINER_DEVICE}, ("actor.mb_spec.max_tokens_per_mb=8192",)),
        (Guess.OUT_OF_MEMORY, {"place": ("trainer", "transfer")}, ("actor.mb_spec.max_tokens_per_mb=8192",)),
        (Guess.SERVER_HANG, {}, ("rollout.request_timeout=600",)),
        (Guess.DEGRADATION, {}, ("actor.optimizer.lr=5e-06",)),
        (Guess.REWARD_FUNCTION, {}, ()),
        (Guess.SERVER_CRASH, {}, ()),
        (None, {}, ()),
    ],
)
def test_the_next_rung_is_of_the_settings_in_force(guess, more, overrides):
    remedy = remedy_of(guess, SETTINGS, **more)
    assert remedy.overrides == overrides
    assert remedy.change


def test_at_start_up_the_remedy_is_the_opposite():
    lower = {**SETTINGS, "sglang.mem_fraction_static": 0.5}
    assert remedy_of(Guess.OUT_OF_MEMORY, lower, ran_out=RanOut.SERVER_POOL_TOO_SMALL).overrides == (
        "sglang.mem_fraction_static=0.6",
    )
    assert "raise" in remedy_of(Guess.OUT_OF_MEMORY, {}, ran_out=RanOut.SERVER_POOL_TOO_SMALL).change


def test_the_settings_of_the_run_are_read(tmp_path):
    settings = "sglang:\n  mem_fraction_static: 0.7\nrollout:\n  max_concurrent_rollouts: 8\n"
    found = diagnosis_of(made_run(tmp_path, Made(fails="server_oom", onset=60), settings=settings))
    assert found.remedy.overrides == ("sglang.mem_fraction_static=0.6",)
    assert found.restore_advice.commands[-1].endswith("sglang.mem_fraction_static=0.6")


@pytest.mark.parametrize("seed", range(12))
def test_damaged_logs_are_diagnosed_or_refused_with_a_reason(tmp_path, seed):
    rng = random.Random(seed)
    logs = RunMaker(Made(fails=rng.choice(FAILURES), onset=20, steps=40)).write(tmp_path / "run")
    for path in sorted(logs.iterdir()):
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 6)):
            begin = rng.randrange(len(data) + 1)
            end = begin + rng.choice([1, 100, 100_000])
            data[begin:end] = rng.choice([b"", bytes(rng.randrange(256) for _ in range(300)), data[begin:end] * 2])
        path.write_bytes(data)
    try:
        found = diagnosis_of(logs)
    except DataError as error:
        assert str(logs) in str(error)
    else:
        assert json.dumps(to_dict(found))


def test_a_diagnosis_is_json_whatever_it_says(tmp_path):
    for fails in ("", "crash", "startup_oom"):
        found = diagnosis_of(RunMaker(Made(fails=fails)).write(tmp_path / (fails or "fine")))
        assert json.loads(json.dumps(to_dict(found)))["is_failure"] is bool(fails)
        assert dataclasses.is_dataclass(found)


def test_a_folder_with_a_space_is_quoted_in_the_command(tmp_path):
    found = diagnosis_of(made_run(tmp_path / "my runs", Made(fails="crash", onset=30, steps=60), steps=(20,)))
    assert found.restore_advice is not None
    (command,) = found.restore_advice.commands
    assert f"--fileroot '{tmp_path / 'my runs'}'" in command


def test_a_copy_of_a_run_has_no_command_that_continues_the_original(tmp_path):
    """Logs that lie elsewhere than a run's own, with its names in their config.yaml."""
    logs = RunMaker(Made(fails="crash", onset=30, steps=60)).write(tmp_path / "copy")
    assert "--experiment-name EXPERIMENT --trial-name TRIAL" in diagnosis_of(logs).restore_advice.commands[0]
    (logs / "config.yaml").write_text("experiment_name: mine\ntrial_name: t7\n")
    advice = diagnosis_of(logs).restore_advice
    assert advice.commands == ()
    assert "These files are a copy" in advice.warning
