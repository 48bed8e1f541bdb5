"""What a committed step leaves in the run's files: lines that people and tools find, and samples that harm nobody."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.training.step_records import SampleLog, StepRecords
from actors.training.training import Training
from launcher.base.messages import StepReport
from launcher.base.rollouts import Completion, Prompt, Rollout, RolloutBatch, RolloutGroup, Segment
from launcher.checkpoints.areal_log import read_step
from launcher.config.reporting import StatsLoggerConfig
from launcher.run_files.journal import read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.hostile_text import HOSTILE, obeyed

REPORT = StepReport(
    global_step=187,
    epoch=0,
    epoch_step=187,
    attempt=1,
    policy_version=188,
    time=1.8e9,
    prompt_ids=(),
    weight_versions=(187,),
    rollouts_failed=0,
    rollouts_retried=0,
    metrics={"rollout/reward": 0.8125},
)


BATCH = RolloutBatch(groups=(), failed=0, retried=0, generated_tokens=0, seconds=1.0)


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


@pytest.fixture
def training(tmp_path):
    """As much of one as writes a step down. `events`: what it has recorded."""
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    events = []
    return SimpleNamespace(
        events=events,
        _config=SimpleNamespace(gconfig=SimpleNamespace(max_new_tokens=24)),
        _journal=SimpleNamespace(record=lambda event, **facts: events.append((event, facts))),
        _records=StepRecords(paths),
        _samples=SimpleNamespace(keep=lambda *kept: None),
        _has_told_no_score=False,
    )


def test_a_first_step_whose_completions_were_cut_is_told_once(training):
    for step, share in ((0, 0.94), (0, 0.95), (1, 1.0)):
        metrics = {**REPORT.metrics, "grpo_actor/no_eos_ratios/avg": share}
        Training._write_down(training, replace(REPORT, global_step=step, metrics=metrics), BATCH)
    ((event, facts),) = training.events
    assert event == "rollouts.cut"
    assert facts["reason"].startswith("95% of the first step's completions were cut at gconfig.max_new_tokens=24: ")


def test_a_reward_function_that_gives_no_score_is_told_once_with_its_error(training):
    """Its prompts were made again and again, and the only word of it was "15 failed" at the end of the run."""
    unscored = replace(BATCH, failed=3, unscored=2, no_score="KeyError: 'total' in rewards.py:7")
    for step, batch in enumerate((BATCH, replace(BATCH, failed=1), unscored, unscored)):
        Training._write_down(training, replace(REPORT, global_step=step), batch)
    ((event, facts),) = training.events
    assert (event, facts["subject"], facts["global_step"]) == ("reward.no_score", "reward", 2)
    assert "KeyError: 'total' in rewards.py:7" in facts["reason"]


def test_each_line_says_of_which_restore_its_step_is(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    assert StepRecords(paths).write(replace(REPORT, lineage=3)) is None
    assert [line["lineage"] for line in read_lines(paths.metrics)] == [3]
    assert "lineage" not in REPORT.metrics_line(), "where nobody knows it"


def step(number, text="4+4=8", n=8):
    made = Completion(
        token_ids=(1, 2), logprobs=(0.0, 0.0), weight_version=number, finish_reason="stop", server="http://s"
    )
    rollouts = tuple(Rollout(completion=made, text=text, reward=0.5, parts={"right": 0.5}) for _ in range(n))
    group = RolloutGroup(prompt=Prompt(id="p", token_ids=(7,), record={}), rollouts=rollouts)
    batch = RolloutBatch(groups=(group,), failed=0, retried=0, generated_tokens=2, seconds=1.0)
    report = StepReport(
        global_step=number,
        epoch=0,
        epoch_step=number,
        attempt=1,
        policy_version=number + 1,
        time=5.0,
        prompt_ids=("p",),
        weight_versions=(number,),
        rollouts_failed=0,
        rollouts_retried=0,
        metrics={},
    )
    return report, batch


def log_of(paths, **changes):
    return SampleLog(paths, StatsLoggerConfig(**changes), lambda ids: [f"prompt {one}" for one in ids])


def test_a_line_has_all_that_made_the_completion(paths):
    log_of(paths, samples=1).keep(*step(3))
    assert json.loads(paths.samples.read_text()) == {
        "global_step": 3,
        "attempt": 1,
        "time": 5.0,
        "prompt_id": "p",
        "prompt": "prompt (7,)",
        "completion": "4+4=8",
        "tokens": 2,
        "finish_reason": "stop",
        "reward": 0.5,
        "parts": {"right": 0.5},
        "weight_version": 3,
        "server": "http://s",
    }


@pytest.mark.parametrize(("wanted", "there", "kept"), [(4, 8, 4), (4, 2, 2), (0, 8, 0)])
def test_so_many_of_each_step(paths, wanted, there, kept):
    samples = log_of(paths, samples=wanted)
    for number in range(3):
        samples.keep(*step(number, n=there))
    assert len(paths.samples.read_text().splitlines() if kept else []) == 3 * kept
    assert paths.samples.exists() == bool(kept)


def test_answers_to_one_prompt_are_kept_beside_each_other(paths):
    report, batch = step(3, n=4)
    (group,) = batch.groups
    groups = tuple(replace(group, prompt=replace(group.prompt, id=f"p{number}")) for number in range(8))
    log_of(paths, samples=6).keep(report, replace(batch, groups=groups))
    kept = [json.loads(line)["prompt_id"] for line in paths.samples.read_text().splitlines()]
    assert [kept.count(prompt) for prompt in dict.fromkeys(kept)] == [4, 2]


def test_the_two_files_stay_within_their_size_and_end_with_the_newest(paths):
    samples = log_of(paths, samples=2, samples_mib=0.02)
    for number in range(200):
        samples.keep(*step(number, text="x" * 500))
        sizes = [file.stat().st_size for file in paths.logs.glob("samples*.jsonl")]
        assert len(sizes) <= 2
        assert sum(sizes) <= 0.02 * 2**20
    older = paths.samples.with_name("samples.1.jsonl").read_text()
    steps = [json.loads(line)["global_step"] for line in (older + paths.samples.read_text()).splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 199


def test_what_a_model_writes_commands_no_terminal(paths):
    log_of(paths).keep(*step(0, text=HOSTILE + "\udc9b"))
    printed = paths.samples.read_text()
    assert obeyed(printed) == set()
    assert json.loads(printed.splitlines()[0])["completion"] == HOSTILE + "\udc9b"


def test_long_texts_are_cut(paths):
    log_of(paths).keep(*step(0, text="x" * 10_000))
    assert len(json.loads(paths.samples.read_text().splitlines()[0])["completion"]) == 4000


def test_a_disk_that_refuses_costs_no_step_and_is_told_once(paths, caplog):
    paths.samples.mkdir()
    samples = log_of(paths)
    samples.keep(*step(0))
    samples.keep(*step(1))
    assert [record.message.startswith("samples.not_kept") for record in caplog.records] == [True]
    paths.samples.rmdir()
    samples.keep(*step(2))
    assert {json.loads(line)["global_step"] for line in paths.samples.read_text().splitlines()} == {2}


def test_of_an_episode_its_own_beginning_is_kept(paths):
    report, batch = step(3, n=1)
    (group,) = batch.groups
    whole = group.rollouts[0].completion
    segment = Segment(prompt=(8, 9), completion=whole, own=(True, True))
    episode = replace(group.rollouts[0], segments=(segment,), turns=2)
    played = replace(batch, groups=(replace(group, rollouts=(episode,)),))
    SampleLog(paths, StatsLoggerConfig(), lambda ids: [" ".join(map(str, one)) for one in ids]).keep(report, played)
    assert json.loads(paths.samples.read_text())["prompt"] == "8 9"
