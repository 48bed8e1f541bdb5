"""FINE is said only where enough was seen: too little is UNCLEAR, a long time without a step is STALLED."""

import json

import pytest

from launcher.diagnosis.judging.verdict import RunCondition
from scripts import diagnose
from tests.support.checkpoint_makers import write_areal_log
from tests.support.made_logs import Made, RunMaker
from tests.support.worlds.diagnosis import diagnosis_of


def read(folder, rewards):
    write_areal_log(folder / "trainer.log", rewards)
    return diagnosis_of(folder)


def test_one_step_with_reward_0_is_no_fine_run(tmp_path, capsys):
    """The field report's excerpt of step 940: "FINE: no failure found in 1 steps" was said of it."""
    found = read(tmp_path, {939: 0.0})
    assert found.condition is RunCondition.UNCLEAR
    assert not found.is_failure
    assert "only 1 step with a reward" in found.headline
    assert "reward 0 since the first of them, step 939" in found.headline
    assert diagnose.main([str(tmp_path)]) == diagnose.UNCLEAR == 3
    assert capsys.readouterr().out.startswith("UNCLEAR: ")


def test_a_log_that_ends_before_its_run_does_says_at_which_step(tmp_path):
    """The field report's second run: its logs end at step 84, and the rewards fell at 188."""
    found = read(tmp_path, [0.5 + 0.01 * (step % 3) for step in range(84)])
    assert found.condition is RunCondition.UNCLEAR
    assert "the log ends at step 84 of 160" in found.headline


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([float("nan")] * 160, "none of the 160 steps has a reward"),
        (dict.fromkeys(range(60, 160), 0.5), "no file shows steps 0 to 59"),
        ({step: 0.5 for step in range(160) if not 50 <= step < 90}, "no file shows steps 50 to 89"),
    ],
)
def test_what_was_not_seen_is_named(tmp_path, rewards, why):
    found = read(tmp_path, rewards)
    assert found.condition is RunCondition.UNCLEAR
    assert why in found.headline


def test_a_table_with_other_characters_is_no_fine_run(tmp_path):
    logs = RunMaker(Made(steps=60)).write(tmp_path / "run")
    text = (logs / "trainer.log").read_text()
    (logs / "trainer.log").write_text(text.replace("│", "|"))
    assert diagnosis_of(logs / "trainer.log").condition is RunCondition.UNCLEAR


def test_a_log_without_a_step_is_no_fine_run(tmp_path):
    (tmp_path / "trainer.log").write_text("20251111-09:00:00.000 StatsLogger INFO: hello\n" * 50)
    found = diagnosis_of(tmp_path)
    assert found.condition is RunCondition.UNCLEAR
    assert "no step was understood" in found.headline


@pytest.fixture
def slow_step(tmp_path):
    """A run of steps of 60 s of which one came `late` seconds later; how it is told."""

    def make(more="", *, last=False, late=3600):
        lines, maker = [], RunMaker(Made(steps=60, plain=True))
        for step in range(30 if last else 60):
            if step == 30:
                lines.append(more)
                maker.now += late
            lines += maker.step(step)
        if last:
            maker.now += 3600
            lines.append(maker._line("Launcher", "still here"))
        (tmp_path / "trainer.log").write_text("\n".join(filter(None, lines)) + "\n")
        return diagnosis_of(tmp_path)

    return make


def test_an_hour_without_a_step_is_a_stall_also_where_the_run_continued(slow_step):
    found = slow_step()
    assert found.condition is RunCondition.STALLED
    assert found.is_failure
    assert found.headline.startswith("no step for 61 min after global step 29, one usually takes 60 s; it continued")


@pytest.mark.parametrize(("late", "condition"), [(9 * 60, RunCondition.FINE), (10 * 60, RunCondition.STALLED)])
def test_ten_usual_steps_without_one_are_the_bound(slow_step, late, condition):
    assert slow_step(late=late).condition is condition


def test_the_same_at_the_end(slow_step):
    found = slow_step(last=True)
    assert found.condition is RunCondition.STALLED
    assert "none has followed" in found.headline


def test_what_the_run_itself_says_of_its_stall_is_told(tmp_path):
    """Seen in a storm: it was paused for its reward function, and the headline did not say so."""
    times = [1.76e9 + 10 * step + 900 * (step >= 20) for step in range(40)]
    steps = [{"global_step": n, "time": t, "grpo_actor/task_reward/avg": 0.5} for n, t in enumerate(times)]
    began = {"time": times[19] + 1, "event": "incident.began", "subject": "reward", "cause": "verifier_broken"}
    began |= {"incident": 3, "reason": "right was scored 0, not 1", "doing": "training waits", "attempt": 1}
    before = began | {"time": times[5], "incident": 2}
    for name, lines in (("metrics", steps), ("events", [before, began])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = diagnosis_of(tmp_path)
    assert found.condition is RunCondition.STALLED
    assert "it continued later. The run says: incident 3: the reward function is broken (right was" in found.headline


def test_a_restart_in_between_is_no_stall(slow_step):
    found = slow_step("20251111-09:45:00.000 Launcher INFO: Experiment made, is_recover_run=True")
    assert found.condition is RunCondition.FINE
