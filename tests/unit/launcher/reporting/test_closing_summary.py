"""The end of a run: the figures are those of the files, and the text names where the rest is."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.messages import RunOutcome, TerminalStatus
from launcher.base.own_python import python
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.reporting.closing_summary import write_summary
from launcher.reporting.run_facts import read_facts
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_paths import RunPaths
from tests.support.report_parts import T0

REPOSITORY = Path(__file__).resolve().parents[4]
FINISHED = RunOutcome(status=TerminalStatus.FINISHED, reason="all 30 steps")


def write_step(paths, step, reward, *, attempt=1, failed=0, retried=1):
    figures = {
        "rollout/reward": reward,
        "rollout/tokens": 1000.0,
        "timeperf/rollout_s": 0.5,
        "timeperf/train_s": 1.0,
        "timeperf/publish_s": 0.1,
        "timeperf/step_s": 2.0,
        "grpo_actor/loss": 0.1,
    }
    head = {"global_step": step, "attempt": attempt, "time": T0 + 100 * attempt + step}
    append_line(paths.metrics, head | figures)
    append_line(
        paths.ledger, {"global_step": step, "attempt": attempt, "rollouts_failed": failed, "rollouts_retried": retried}
    )


def write_run(paths):
    """30 steps; 20 to 24 were trained twice, since the run was restored to step 19."""
    now = [T0]
    journal = Journal(paths.events, 1, lambda: now[0])
    journal.record("eval.done", global_step=-1, policy_version=0, prompts=64, sampled=0.25, greedy=0.5)
    for step in range(25):
        write_step(paths, step, 0.1 if step < 10 else 0.5, failed=int(step == 3))
    now[0] = T0 + 150
    journal.record("batch.rejected", global_step=24)
    for number, seconds in enumerate((2.0, 4.0, 3.0), 1):
        journal.record("incident.began", subject="server-0", incident=number, cause="server_crash")
        now[0] += seconds
        journal.record("incident.ended", subject="server-0", incident=number, is_mended=True)
    journal.record("incident.began", subject="reward", incident=4, cause="verifier_broken")
    journal.record("trainer.restored", global_step=19)
    for step in range(20, 30):
        write_step(paths, step, 0.9, attempt=2)
    now[0] = T0 + 300
    journal.record("checkpoint.committed", global_step=29)
    journal.record("eval.done", global_step=29, policy_version=30, prompts=64, sampled=0.75, greedy=0.875)


def save(store, step):
    with store.staging(CheckpointName(epoch=0, epoch_step=step, global_step=step)) as staged:
        (staged / "model.safetensors").write_bytes(b"w")
        store.commit(staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={}, keep=False)


def test_every_figure_is_that_of_the_files(paths):
    write_run(paths)
    facts = read_facts(paths)
    assert (len(facts.steps), sum(map(len, facts.taken_back))) == (30, 5)
    assert facts.reward_first == pytest.approx(0.1)
    assert facts.reward_last == pytest.approx(0.9)
    assert [(report.sampled, report.greedy) for report in facts.evals] == [(0.25, 0.5), (0.75, 0.875)]
    assert (facts.tokens_per_s, facts.losses.usual_step_s) == (2000.0, 2.0)
    assert (facts.rollouts_failed, facts.rollouts_retried, facts.rejected) == (1, 35, 1)


@pytest.mark.slow
def test_the_text_a_person_reads(paths):
    write_run(paths)
    save(CheckpointStore(paths.default_checkpoints), 29)
    paths.report.write_text("")
    assert write_summary(paths, FINISHED).splitlines() == [
        "FINISHED  exp / t0: all 30 steps",
        "",
        "  reward      0.100 (first 10 steps) → 0.900 (last 10 of 30; 5 more were undone)",
        "  held-out    sampled 0.250 → 0.750 (+0.500)   greedy 0.500 → 0.875 (+0.375)   (64 problems, version 0 → 30)",
        "  speed       2,000 tokens/s in rollouts   2.0 s for a step",
        "  time        rollout 25.0%   train 50.0%   other 25.0% (publish 5.0%)",
        "  rollouts    1 failed   35 retried   rejected batches: 1",
        "  incidents   4, 3 repaired: 3 server_crash (median 3.0 s), 1 verifier_broken",
        "  checkpoints 1, newest epoch0epochstep29globalstep29",
        f"  report      {paths.report}",
        f"  files       {paths.logs}: metrics.jsonl ledger.jsonl events.jsonl",
        f"  watch       {python()} -m scripts.watch --fileroot {paths.fileroot}",
        f"  ledger      {python()} -m scripts.check_ledger {paths.logs}",
    ]


@pytest.mark.parametrize(
    ("prices", "line"),
    [
        ({"config.yaml": "null"}, ""),
        ({"config.yaml": "7.2"}, "  cost        faults 0.30 of 0.60 (2:29 of 5:00; run.price_per_hour=7.2)"),
        (
            {"config.yaml": "3", "config.attempt2.yaml": "0"},
            "  cost        faults 0.00 of 0.00 (2:29 of 5:00; run.price_per_hour=0)",
        ),
    ],
)
def test_a_price_shows_what_faults_cost(paths, prices, line):
    write_run(paths)
    for name, price in prices.items():
        (paths.logs / name).write_text(f"run: {{price_per_hour: {price}}}\n")
    said = [one for one in write_summary(paths, FINISHED).splitlines() if one.startswith("  cost")]
    assert said == [line] * bool(line)


def test_one_evaluation_is_no_change(paths):
    """It was told as `sampled 0.250 → 0.250 (+0.000)`."""
    journal = Journal(paths.events, 1, lambda: T0)
    journal.record("eval.done", global_step=-1, policy_version=0, prompts=64, sampled=0.25, greedy=0.5)
    write_step(paths, 0, 0.1)
    text = write_summary(paths, FINISHED)
    assert "  held-out    sampled 0.250   greedy 0.500   (64 problems, version 0 alone)\n" in text


def test_a_run_that_did_not_get_to_a_step_says_what_to_do_next(paths):
    outcome = RunOutcome(
        status=TerminalStatus.ERRORED, reason="server 0 did not start", next_command="python -m launcher conf=x"
    )
    text = write_summary(paths, outcome)
    assert text.startswith("ERRORED  exp / t0: server 0 did not start\n")
    assert "no step was committed" in text
    assert "  next        python -m launcher conf=x" in text
    assert paths.summary.read_text() == text + "\n"


def test_numbers_that_are_none_are_left_out_of_the_means(paths):
    for step, reward in enumerate([math.nan, 0.4, math.inf, 0.6]):
        write_step(paths, step, reward)
    append_line(paths.metrics, {"global_step": 4, "rollout/reward": "broken"})
    facts = read_facts(paths)
    assert len(facts.steps) == 5
    assert facts.reward_last == pytest.approx(0.5)
    assert "  reward      0.500 (mean of 2 steps)" in write_summary(paths, FINISHED), (
        "and not of the first and last ten"
    )


def test_a_full_disk_costs_the_file_not_the_word(tiny_disk):
    paths = RunPaths(fileroot=tiny_disk.path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    write_step(paths, 0, 0.5)
    (tiny_disk / "ballast").write_bytes(b"\0" * tiny_disk.free())
    text = write_summary(paths, FINISHED)
    assert text.startswith("FINISHED")
    assert "summary.txt was not written: [Errno 28] No space left" in text
    assert not paths.summary.exists()
    assert [path.name for path in paths.logs.iterdir() if path.name.startswith(".")] == []


def test_records_that_cant_be_read_cost_the_figures_not_the_word(paths):
    paths.metrics.mkdir()
    text = write_summary(
        paths, RunOutcome(status=TerminalStatus.ABORTED, reason="by the user", next_command="python -m launcher")
    )
    assert text.startswith("ABORTED  exp / t0: by the user\n")
    assert "metrics.jsonl can't be read" in text
    assert text.endswith("python -m launcher")


def test_what_is_read_only_at_the_end_is_not_imported_at_the_start():
    """A command's first step must not wait for a drawing library; nothing here may bring in Ray or torch either."""
    program = (
        "import sys; import launcher.config.schedule, launcher.run_files.journal\n"
        "from launcher.reporting import closing_summary, live_display, wandb_sink\n"
        "print([name for name in ('matplotlib', 'wandb', 'ray', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
