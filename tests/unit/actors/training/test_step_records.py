"""What trainer.log says of a step: found by the words that people know from AReaL's logs, read as one of ours."""

import logging

from actors.training.step_records import StepRecords
from launcher.base.messages import StepReport
from launcher.checkpoints.areal_log import read_step
from launcher.run_files.run_paths import RunPaths


def test_the_line_of_a_step_is_found_by_areals_words_and_read_as_ours(tmp_path, caplog):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    report = StepReport(
        global_step=187, epoch=0, epoch_step=187, attempt=1, policy_version=188, time=1.8e9, prompt_ids=(),
        weight_versions=(187,), rollouts_failed=0, rollouts_retried=0, metrics={"rollout/reward": 0.8125},
    )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="trainer"):
        StepRecords(paths).write(report)
    (said,) = [record.message for record in caplog.records]
    assert "Train step 188" in said
    line = f"2026-11-22 03:51:38,382 trainer INFO: {said}\n".encode()
    assert read_step(line, 0, len(line)).values == {"rollout/reward": 0.812}
    assert read_step(line, 0, len(line)).global_step == 187
