"""What trainer.log says of a step: found by the words that people know from AReaL's logs, read as one of ours."""

import logging
from dataclasses import replace
from types import SimpleNamespace

from actors.training.step_records import StepRecords
from actors.training.training import Training
from launcher.base.messages import StepReport
from launcher.checkpoints.areal_log import read_step
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths

REPORT = StepReport(
    global_step=187, epoch=0, epoch_step=187, attempt=1, policy_version=188, time=1.8e9, prompt_ids=(),
    weight_versions=(187,), rollouts_failed=0, rollouts_retried=0, metrics={"rollout/reward": 0.8125},
)  # fmt: skip


def test_the_line_of_a_step_is_found_by_areals_words_and_read_as_ours(tmp_path, caplog):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    with caplog.at_level(logging.INFO, logger="trainer"):
        StepRecords(paths).write(REPORT)
    (said,) = [record.message for record in caplog.records]
    assert "Train step 188" in said
    line = f"2026-11-22 03:51:38,382 trainer INFO: {said}\n".encode()
    assert read_step(line, 0, len(line)).values == {"rollout/reward": 0.812}
    assert read_step(line, 0, len(line)).global_step == 187


def test_a_first_step_whose_completions_were_cut_is_told_once(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    events = []
    training = SimpleNamespace(
        _config=SimpleNamespace(gconfig=SimpleNamespace(max_new_tokens=24)),
        _journal=SimpleNamespace(record=lambda event, **facts: events.append((event, facts["reason"]))),
        _records=StepRecords(paths),
        _samples=SimpleNamespace(keep=lambda *kept: None),
    )
    for step, share in ((0, 0.94), (0, 0.95), (1, 1.0)):
        metrics = {**REPORT.metrics, "grpo_actor/no_eos_ratios/avg": share}
        Training._write_down(training, replace(REPORT, global_step=step, metrics=metrics), None)
    ((event, reason),) = events
    assert event == "rollouts.cut"
    assert reason.startswith("95% of the first step's completions were cut at gconfig.max_new_tokens=24: ")


def test_each_line_says_of_which_restore_its_step_is(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    assert StepRecords(paths).write(replace(REPORT, lineage=3)) is None
    assert [line["lineage"] for line in read_lines(paths.metrics)] == [3]
    assert "lineage" not in REPORT.metrics_line(), "where nobody knows it"
