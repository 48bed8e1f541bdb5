"""What two lost runs and their guides name: each line of the reports, as a person had it in hand."""

import pytest

from launcher.checkpoints.onset import Shape
from launcher.diagnosis.judging.rules import Guess
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.diagnosis.output.as_text import say_onset
from launcher.diagnosis.reading.log_records import Kind
from tests.support.checkpoint_makers import write_areal_log
from tests.support.made_logs import Made, RunMaker, table
from tests.support.worlds.diagnosis import diagnosis_of

FIRST = {0: 0.34, 1: 0.47, 2: 0.34, 3: 0.50, 4: 0.34, 27: 0.41, 62: 0.59, 79: 0.63, 81: 0.75, 82: 0.38}
EXCERPT = (
    "20251111-11:37:11.251 StatsLogger INFO: Epoch 2/5 Step 5/935 Train step 940/4675 done.\n"
    "20251111-11:37:11.251 StatsLogger INFO: Stats (1/1):\n"
)


def test_the_excerpt_of_one_step_is_unclear(tmp_path):
    zeros = dict.fromkeys(("grpo_actor/task_reward/avg", "grpo_actor/task_reward/max", "rollout/reward"), 0.0)
    (tmp_path / "trainer.log").write_text(EXCERPT + table(zeros))
    found = diagnosis_of(tmp_path)
    assert found.condition is RunCondition.UNCLEAR
    assert "reward 0 since the first of them, step 939" in found.headline
    assert "the log ends at step 940 of 4675" in found.headline


def write_run(path, *, server_log=None):
    """Steps 0 to 879 of one H200: up to 0.8, from 188 on 0, with spikes that are no recovery; a step a minute."""
    lines = []
    for step in range(880):
        reward = FIRST.get(step, min(0.34 + 0.0026 * step, 0.8) + 0.04 * (step % 3 - 1))
        if step >= 188:
            is_spike = step in range(680, 750, 9) or step in range(780, 830, 9)
            reward = 0.42 if is_spike else 0.12 if step in range(850, 860, 5) else 0.0
        clock = f"202511{13 + step // 1440:02}-{step // 60 % 24:02}:{step % 60:02}:00.000"
        figures = {
            "grpo_actor/task_reward/avg": reward,
            "grpo_actor/update/grad_norm": 2.0 + step % 3,
            "grpo_actor/update/update_successful": 1.0,
            "timeperf/rollout": 30.0 + step % 3 if step < 188 else 1.0,
            "grpo_actor/seq_len/avg": 400.0 + step % 9 if step < 188 else 90.0,
        }
        lines.append(f"{clock} StatsLogger INFO: Epoch 1/1 Step {step + 1}/880 Train step {step + 1}/880 done.\n")
        lines.append(f"{clock} FSDPEngine INFO: memory allocated (GB): 133.4, total (GB): 139.8\n" + table(figures))
    path.write_text("".join(lines))


def test_run_b_fell_at_188_and_its_spikes_are_no_recovery(tmp_path):
    write_run(tmp_path / "trainer.log")
    found = diagnosis_of(tmp_path)
    assert (found.condition, found.onset.step, found.onset.is_over) == (RunCondition.FELL, 188, False)
    assert found.onset.shape in (Shape.ZERO, Shape.SPIKES)
    assert found.restore_advice.until <= 187


@pytest.mark.parametrize("guess", [Guess.REWARD_FUNCTION, Guess.OUT_OF_MEMORY, Guess.DEGRADATION])
def test_run_b_s_figures_accuse_servers_and_nothing_else(tmp_path, guess):
    """Rollouts 30 times faster, completions empty, no server's log; memory high and stable, no line of an OOM."""
    write_run(tmp_path / "trainer.log")
    causes = diagnosis_of(tmp_path).causes
    assert causes.first.guess is Guess.SERVER_CRASH
    assert next(one for one in causes.ranked if one.guess is guess).score < causes.first.score
    assert any("no server log was given" in text for text in causes.missing)


def test_a_fall_is_as_long_as_its_zeros(tmp_path):
    """Run A: reward 0 up to its last checkpoint, of step 1869."""
    write_areal_log(tmp_path / "trainer.log", [0.6 + 0.02 * (step % 3) if step < 940 else 0.0 for step in range(1870)])
    found = diagnosis_of(tmp_path)
    assert (found.onset.step, found.onset.bad_steps) == (940, 930)
    assert "to exactly 0, 930 steps" in say_onset(found.onset)


def test_connections_refused_long_after_the_fall_are_no_cause_of_it(tmp_path):
    write_run(tmp_path / "trainer.log")
    with (tmp_path / "trainer.log").open("a") as log:
        log.write("20251114-05:09:00.000 WorkflowExecutor ERROR: Connect call failed ('127.0.0.1', 1)\n" * 40)
    found = diagnosis_of(tmp_path)
    assert found.onset.step == 188
    assert [e.after_step for e in found.contents.log_events if e.kind is Kind.REFUSED] == [879]
    assert not any("refused" in e.text for one in found.causes.ranked for e in one.supporting)


def test_areals_line_of_a_recovery_point_is_one_of_a_checkpoint(tmp_path):
    write_run(tmp_path / "trainer.log")
    with (tmp_path / "trainer.log").open("a") as log:
        log.write("20251114-05:09:00.000 RecoverHandler INFO: Dumped recover info to file.\n")
    found = diagnosis_of(tmp_path).contents.log_events
    assert [(e.kind, e.after_step) for e in found if e.kind is Kind.CHECKPOINT] == [(Kind.CHECKPOINT, 879)]


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (
            "LocalLauncher INFO: LocalLauncher: experiment_name=gsm8k, trial_name=t9, fileroot={here}, run_id=1, "
            "is_recover_run=True",
            "--experiment-name gsm8k --trial-name t9 --fileroot {here}",
        ),
        (
            "Recover INFO: Saved recover checkpoint to {here}/checkpoints/ann/gsm8k/t9/default/recover_checkpoint "
            "(with_optim=True)",
            "--experiment-name gsm8k --trial-name t9 --fileroot {here} --user ann",
        ),
    ],
)
def test_names_are_those_that_the_log_has(tmp_path, line, flags):
    logs = RunMaker(Made(fails="crash", onset=30, steps=60)).write(tmp_path / "elsewhere")
    log = logs / "trainer.log"
    text = log.read_text()
    for here, expected in ((tmp_path, flags.format(here=tmp_path)), ("/nowhere", "EXPERIMENT --trial-name TRIAL")):
        log.write_text(f"(AReaL) 20251111-00:00:01.000 {line.format(here=here)}\n" + text)
        assert expected in diagnosis_of(logs).restore_advice.commands[0], "another machine's is not named"
